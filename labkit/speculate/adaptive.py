"""Draft lengths that follow the running acceptance: as many tokens as pay, and none where none do.

    alpha    running mean of kept / examined of each row, older tokens counting less; starts at `START`
    length   the one with the best tokens per second by the formula of `labkit.plan.time`, for this alpha and these costs
    probing  where the best is 0, one short draft after 8, 16, 32 ... plain steps, in case the text has changed

Costs are numbers that are given (measured), or follow from bytes: never the clock of this very run, so that equal seeds
give equal texts. Each call starts alike. Loses a little to a fixed length that happens to be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.model.native_decoder import NativeDecoder
from labkit.plan.time import SpeculationCosts, best_draft_length
from labkit.speculate.draft import Drafter

START, WEIGHT, MEMORY = 0.6, 3.0, 0.9  # alpha before anything was seen, as so many tokens; a token's weight one token later
FIRST_PAUSE = 8


@dataclass
class Pace:
    """One row: what is believed of its acceptance, and how long nothing has been drafted."""

    kept: float = START * WEIGHT
    seen: float = WEIGHT
    pause: int = FIRST_PAUSE
    waited: int = 0

    @property
    def alpha(self) -> float:
        return min(self.kept / self.seen, 0.99)

    def update(self, drafted: int, accepted: int) -> None:
        for kept in (True,) * accepted + (False,) * (accepted < drafted):
            self.kept, self.seen = MEMORY * self.kept + kept, MEMORY * self.seen + 1


class Adaptive(Drafter):
    """Any drafter, asked for as many tokens as pay. `verify`: what a target pass costs; None is what is usual."""

    def __init__(self, drafter: Drafter, verify: Sequence[float] | None = None):
        self.drafter, self.verify = drafter, verify
        self.name, self.wants_hidden, self.cost = drafter.name, drafter.wants_hidden, drafter.cost
        self._paces: list[Pace] = []

    def check(self, target) -> None:
        self.drafter.check(target)

    def share(self, cache) -> None:
        self.drafter.share(cache)

    def begin(self, request, rows, hidden=None) -> None:
        self._paces, self._drafted = [Pace() for _ in rows], [0] * len(rows)
        self._costs = SpeculationCosts(self.drafter.cost, tuple(self.verify or usual_verify(request.model)))
        self.drafter.begin(request, rows, hidden)

    def propose(self, rows, limits):
        lengths = [min(limit, self._length(pace, limit)) for pace, limit in zip(self._paces, limits)]
        drafts = self.drafter.propose(rows, lengths)
        self._drafted = [len(draft.tokens) for draft in drafts]
        return drafts

    def _length(self, pace: Pace, limit: int) -> int:
        best = best_draft_length(pace.alpha, self._costs, limit)
        if best:
            pace.waited, pace.pause = 0, FIRST_PAUSE
            return best
        pace.waited += 1
        if pace.waited <= pace.pause:
            return 0
        pace.waited, pace.pause = 0, 2 * pace.pause
        return 1

    def observe(self, accepted, hidden=None) -> None:
        for pace, drafted, kept in zip(self._paces, self._drafted, accepted):
            pace.update(drafted, kept)
        self._drafted = [0] * len(self._paces)
        self.drafter.observe(accepted, hidden)

    def select(self, keep) -> None:
        self._paces, self._drafted = [self._paces[place] for place in keep], [0] * len(keep)
        self.drafter.select(keep)

    def adaptive(self, verify=None) -> Drafter:
        return Adaptive(self.drafter, verify)


def usual_verify(target) -> tuple[float, ...]:
    """A target pass over 1, 2, 3 ... tokens in plain steps, as seen on CPUs. PyTorch's products of two or three rows are
    slower than of four; the native kernels read the weights once for all. On a GPU few rows cost what one costs."""
    if target.device.type != "cpu":
        return 1.0, 1.02
    return (1.0, 1.05) if isinstance(target, NativeDecoder) else (1.0, 1.7, 2.0, 1.5, 1.5, 1.7, 1.9)
