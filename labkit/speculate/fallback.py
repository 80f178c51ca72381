"""Use one drafter first, usually look-up, and another one if the first finds nothing.

Repeated text costs nothing to draft and is nearly always accepted. In rows without a
repetition the second drafter drafts. It may have missed passes, so a history may have
more new tokens than it drafted itself. It reads them first.
"""

from __future__ import annotations

from labkit.generate.drafter import Draft, Drafter
from labkit.speculate.lookup import Lookup


class LookupFirst(Drafter):
    """Draft with `first`, and with `second` in rows for which `first` drafts nothing.

    `first` should draft only from reliable matches. None means `Lookup(shortest=3)`.
    """

    def __init__(self, second: Drafter, first: Drafter | None = None):
        self.first, self.second = first or Lookup(shortest=3), second
        self.name = f"{self.first.name}, then {self.second.name}"
        self.wants_hidden = self.first.wants_hidden or second.wants_hidden
        self.cost = second.cost

    def check(self, target) -> None:
        self.first.check(target)
        self.second.check(target)

    def share(self, cache) -> None:
        self.first.share(cache)
        self.second.share(cache)

    def begin(self, request, rows, hidden=None) -> None:
        self.by_first = [False] * len(rows)
        self.first.begin(request, rows, hidden)
        self.second.begin(request, rows, hidden)

    def propose(self, rows, limits) -> list[Draft]:
        drafts = self.first.propose(rows, limits)
        self.by_first = [len(draft.tokens) > 0 for draft in drafts]
        rest = [0 if first else limit for first, limit in zip(self.by_first, limits)]
        if any(rest):
            others = self.second.propose(rows, rest)
            drafts = [a if first else b for first, a, b in zip(self.by_first, drafts, others)]
        return drafts

    def observe(self, accepted, hidden=None) -> None:
        pairs = list(zip(self.by_first, accepted))
        self.first.observe([kept if first else 0 for first, kept in pairs], hidden)
        self.second.observe([0 if first else kept for first, kept in pairs], hidden)
        self.by_first = [False] * len(pairs)

    def select(self, keep) -> None:
        self.by_first = [False] * len(keep)
        self.first.select(keep)
        self.second.select(keep)

    def map(self, wrap) -> Drafter:
        return LookupFirst(self.second.map(wrap), self.first.map(wrap))
