"""Look up first, ask a model otherwise: two drafters in a row.

What the text repeats costs nothing to draft and is nearly always right; where it repeats nothing, the second drafter is
asked. It is asked for those rows only, and reads what it missed when its turn comes.
"""

from __future__ import annotations

from labkit.speculate.draft import Draft, Drafter
from labkit.speculate.lookup import Lookup


class LookupFirst(Drafter):
    """`first` drafts where it has something; `second` everywhere else. A first match should be a sure one."""

    def __init__(self, second: Drafter, first: Drafter | None = None):
        self.first, self.second = first or Lookup(shortest=3), second
        self.name = f"{self.first.name}, then {self.second.name}"
        self.wants_hidden, self.cost = self.first.wants_hidden or second.wants_hidden, second.cost

    def check(self, target) -> None:
        self.first.check(target)
        self.second.check(target)

    def share(self, cache) -> None:
        self.first.share(cache)
        self.second.share(cache)

    def begin(self, request, rows, hidden=None) -> None:
        self._from_first = [False] * len(rows)
        self.first.begin(request, rows, hidden)
        self.second.begin(request, rows, hidden)

    def propose(self, rows, limits) -> list[Draft]:
        found = self.first.propose(rows, limits)
        self._from_first = [len(draft.tokens) > 0 for draft in found]
        rest = [0 if here else limit for here, limit in zip(self._from_first, limits)]
        asked = self.second.propose(rows, rest) if any(rest) else found
        return [a if here else b for here, a, b in zip(self._from_first, found, asked)]

    def observe(self, accepted, hidden=None) -> None:
        self.first.observe([kept if here else 0 for here, kept in zip(self._from_first, accepted)], hidden)
        self.second.observe([0 if here else kept for here, kept in zip(self._from_first, accepted)], hidden)
        self._from_first = [False] * len(self._from_first)

    def select(self, keep) -> None:
        self._from_first = [False] * len(keep)
        self.first.select(keep)
        self.second.select(keep)

    def adaptive(self, verify=None) -> Drafter:
        return LookupFirst(self.second.adaptive(verify), self.first.adaptive(verify))
