"""Draft lengths that follow the running acceptance: as many tokens as pay, and none where none do.

    alpha    running mean of kept / examined of each row, older passes counting less; starts at `START`
    length   the one with the best tokens per second by the formula of `labkit.plan.time`, for this alpha and these costs
    probing  where the best is 0, one short draft after 8, 16, 32 ... plain steps, in case the text has changed

Costs are numbers that are given (measured), or follow from bytes: never the clock of this very run, so that equal seeds
give equal texts. Each call starts alike. Loses a little to a fixed length that happens to be right.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.plan.time import SpeculationCosts, best_draft_length
from labkit.speculate.draft import Drafter

START, WEIGHT, MEMORY = 0.6, 3.0, 0.9  # alpha before anything was seen, counted as so many tokens; what a token keeps a pass later
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
        examined = min(accepted + 1, drafted)
        if examined:
            self.kept, self.seen = MEMORY * self.kept + accepted, MEMORY * self.seen + examined


class Adaptive(Drafter):
    """Any drafter, asked for as many tokens as pay. `costs`: None is what the drafter says of itself."""

    def __init__(self, drafter: Drafter, costs: SpeculationCosts | None = None):
        self.drafter, self.costs = drafter, costs
        self.name, self.wants_hidden, self.cost = drafter.name, drafter.wants_hidden, drafter.cost
        self._paces: list[Pace] = []

    def check(self, target) -> None:
        self.drafter.check(target)

    def begin(self, request, rows, hidden=None) -> None:
        self._paces, self._drafted = [Pace() for _ in rows], [0] * len(rows)
        self._costs = self.costs or SpeculationCosts(self.drafter.cost)
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

    def adaptive(self) -> Drafter:
        return self
