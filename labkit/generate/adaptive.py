"""Choose each draft's length from the running acceptance, for the most tokens per second.

    alpha    running mean of accepted / examined tokens per row; older tokens count less
    length   the one with the most tokens per second for this alpha (`labkit.plan.time`)
    probing  if that length is 0, one short draft after 8, 16, 32 ... plain steps, because
             the text may have changed

Costs are measured before the run or computed from the bytes that are read. They never
come from the clock of the same run, so equal seeds give equal texts. Every call starts in
the same state. When it loses: the best fixed length for a text is a little faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.generate.drafter import Draft, Drafter
from labkit.model.decoder import Decoder
from labkit.plan.time import SpeculationCosts, best_draft_length

LONGEST = 12  # the longest draft of an adaptive drafter
START = 0.6  # alpha before anything was seen
WEIGHT = 3.0  # the number of tokens that `START` counts for
MEMORY = 0.9  # the weight of a token, one token later
FIRST_PAUSE = 8


@dataclass
class Pace:
    """The running acceptance of one row, and how long it has not drafted.

    `accepted` and `examined` are sums of tokens with decaying weights. `waited` counts
    passes without a draft; after `pause` of them, one token is drafted.
    """

    accepted: float = START * WEIGHT
    examined: float = WEIGHT
    pause: int = FIRST_PAUSE
    waited: int = 0

    @property
    def alpha(self) -> float:
        return min(self.accepted / self.examined, 0.99)

    def update(self, drafted: int, accepted: int) -> None:
        """Add the tokens of a draft that were examined: the accepted ones and a rejected one."""
        for kept in [True] * accepted + [False] * (accepted < drafted):
            self.accepted = MEMORY * self.accepted + kept
            self.examined = MEMORY * self.examined + 1

    def length(self, costs: SpeculationCosts, limit: int) -> int:
        """Return the number of tokens to draft now, at most `limit`."""
        best = best_draft_length(self.alpha, costs, limit)
        if best:
            self.waited, self.pause = 0, FIRST_PAUSE
            return best
        self.waited += 1
        if self.waited <= self.pause:
            return 0
        self.waited, self.pause = 0, 2 * self.pause
        return 1


class Adaptive(Drafter):
    """A drafter with an adaptive draft length, made by `adaptive`."""

    def __init__(self, drafter: Drafter, verify: Sequence[float] | None = None):
        self.drafter, self.verify = drafter, verify
        self.name, self.wants_hidden, self.cost = drafter.name, drafter.wants_hidden, drafter.cost

    def check(self, target: Decoder) -> None:
        self.drafter.check(target)

    def share(self, cache) -> None:
        self.drafter.share(cache)

    def begin(self, request, rows, hidden=None) -> None:
        self.paces, self.drafted = [Pace() for _ in rows], [0] * len(rows)
        verify = tuple(self.verify or usual_verify(request.model))
        self.costs = SpeculationCosts(self.drafter.cost, verify)
        self.drafter.begin(request, rows, hidden)

    def propose(self, rows, limits) -> list[Draft]:
        lengths = [pace.length(self.costs, limit) for pace, limit in zip(self.paces, limits)]
        drafts = self.drafter.propose(rows, lengths)
        self.drafted = [len(draft.tokens) for draft in drafts]
        return drafts

    def observe(self, accepted, hidden=None) -> None:
        for pace, drafted, kept in zip(self.paces, self.drafted, accepted):
            pace.update(drafted, kept)
        self.drafted = [0] * len(self.paces)
        self.drafter.observe(accepted, hidden)

    def select(self, keep) -> None:
        self.paces = [self.paces[i] for i in keep]
        self.drafted = [0] * len(keep)
        self.drafter.select(keep)

    def map(self, wrap) -> Drafter:
        return self.drafter.map(wrap)


def adaptive(drafter: Drafter, verify: Sequence[float] | None = None) -> Drafter:
    """Return `drafter` with adaptive lengths.

    If it is made of several drafters, each adapts separately. `verify[i]` is the measured
    cost of a target pass over i + 1 tokens, in plain steps. None means `usual_verify`.
    """
    return drafter.map(lambda part: Adaptive(part, verify))


def usual_verify(target: Decoder) -> tuple[float, ...]:
    """Return typical costs of a target pass over 1, 2, 3 ... tokens, in plain steps.

    On CPUs, PyTorch's matrix products are slower for two or three rows than for four.
    The native kernels read the weights once for all rows. On a GPU, a few rows cost as
    much as one.
    """
    if target.device.type != "cpu":
        return 1.0, 1.02
    return (1.0, 1.05) if target.kernels == "native" else (1.0, 1.7, 2.0, 1.5, 1.5, 1.7, 1.9)
