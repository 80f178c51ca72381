"""Prompt look-up: what followed the same few tokens before may follow them again; no model at all.

The text's last n tokens are looked for earlier in prompt and text, the longest n first, and what followed there is the
draft; of several places, the most recent (Saxena 2023, "prompt lookup decoding"). Where the draft reaches the end of the
text it goes on with itself, so a loop of any length is drafted whole. A match of n tokens is trusted for 2 n: two tokens
agree by chance now and then, eight hardly ever.

An index from n tokens to the place behind their latest occurrence grows with the text: n_max entries a token, so a step
costs a few look-ups whatever the length (a scan would cost the text). The text's own end is entered only when a token
follows it, so it is never its own match. Pays in copying, editing, code and lists; drafts little in free prose, where the
wasted part is what a pass over more tokens costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.errors import BadRequest, whole_number
from labkit.speculate.draft import NOTHING, Draft, Drafter


class Lookup(Drafter):
    """`longest` and `shortest`: tokens that must agree; the longest match that there is decides. `trust`: tokens drafted for
    each that agrees."""

    name = "lookup"

    def __init__(self, longest: int = 8, shortest: int = 2, trust: int = 2):
        if not 1 <= whole_number(shortest, "shortest") <= whole_number(longest, "longest"):
            raise BadRequest(f"shortest is {shortest} and longest {longest}; give 1 or more, and the longest not below it.")
        if whole_number(trust, "trust") < 1:
            raise BadRequest(f"trust is {trust}; give at least 1 token to draft for each that agrees.")
        self.longest, self.shortest, self.trust = longest, shortest, trust
        self._indices: list[Index] = []

    def begin(self, request, rows, hidden=None) -> None:
        self._indices = [Index(self.longest, self.shortest) for _ in rows]

    def propose(self, rows, limits) -> list[Draft]:
        found = []
        for index, row, limit in zip(self._indices, rows, limits):
            index.extend(row.history)
            tokens = index.continuation(row.history, limit, self.trust) if limit else ()
            found.append(Draft(tokens) if tokens else NOTHING)
        return found

    def select(self, keep) -> None:
        self._indices = [self._indices[place] for place in keep]


class Index:
    """Where each run of `shortest` to `longest` tokens was last followed by something."""

    def __init__(self, longest: int, shortest: int):
        self.sizes = range(longest, shortest - 1, -1)
        self.after: dict[tuple[int, ...], int] = {}  # tokens -> the place of what followed
        self.known = 0  # places whose preceding tokens have been entered

    def extend(self, text: Sequence[int]) -> None:
        """Enter what precedes each new token of `text`, which must begin with what was entered before."""
        for place in range(self.known, len(text)):
            for size in self.sizes:
                if size <= place:
                    self.after[tuple(text[place - size : place])] = place
        self.known = len(text)

    def match(self, text: Sequence[int]) -> tuple[int, int] | None:
        """(place of what followed, tokens that agree), or None."""
        for size in self.sizes:
            if size <= len(text):
                place = self.after.get(tuple(text[len(text) - size :]))
                if place is not None:
                    return place, size
        return None

    def continuation(self, text: Sequence[int], limit: int, trust: int) -> list[int]:
        """What followed the latest place that ends as `text` does: `trust` tokens for each that agrees, up to `limit`."""
        found = self.match(text)
        if found is None:
            return []
        (place, size), tokens = found, []
        for at in range(place, place + min(limit, trust * size)):
            tokens.append(text[at] if at < len(text) else tokens[at - len(text)])
        return tokens
