"""Prompt look-up: what followed the same few tokens before may follow them again.

No model at all.

The text's last n tokens are looked up earlier in prompt and text, the largest n first,
and what followed there is the draft; of several places, the latest one (Saxena 2023,
"prompt lookup decoding"). A draft that reaches the end of the text continues from its
own start, so a loop of any length is drafted whole. A match of n tokens is trusted for 2 n tokens:
two tokens agree by chance now and then, eight hardly ever.

An index from n tokens to the place after their latest occurrence grows with the text: a
few entries per token, so a step costs a few look-ups at any length (a scan would cost
the whole text). The end of the text is entered only when a token follows it, so it
never matches itself. It pays in copying, editing, code and lists. It drafts little in
free prose, and wrong drafts cost a pass over more tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.errors import BadRequest, Whole, check_fields
from labkit.generate.drafter import Draft, Drafter


class Lookup(Drafter):
    """`shortest` to `longest` tokens must agree; the longest match decides.

    `trust`: the number of tokens drafted for each one that agrees.
    """

    name = "lookup"

    def __init__(self, longest: int = 8, shortest: int = 2, trust: int = 2):
        self.longest, self.shortest, self.trust = longest, shortest, trust
        check_fields(self, longest=Whole(1), shortest=Whole(1), trust=Whole(1))
        if shortest > longest:
            raise BadRequest(
                f"shortest is {shortest} and longest {longest}; give longest >= shortest."
            )
        self.indices: list[Index] = []

    def begin(self, request, rows, hidden=None) -> None:
        self.indices = [Index(self.longest, self.shortest) for _ in rows]

    def propose(self, rows, limits) -> list[Draft]:
        drafts = []
        for index, row, limit in zip(self.indices, rows, limits):
            index.extend(row.history)
            drafts.append(Draft(index.continuation(row.history, limit, self.trust)))
        return drafts

    def select(self, keep) -> None:
        self.indices = [self.indices[place] for place in keep]


class Index:
    """The place after the latest occurrence of each run of `shortest` to `longest` tokens."""

    def __init__(self, longest: int, shortest: int):
        self.sizes = range(longest, shortest - 1, -1)
        self.after: dict[tuple[int, ...], int] = {}
        self.known = 0  # places whose preceding tokens have been entered

    def extend(self, text: Sequence[int]) -> None:
        """Index the new tokens of `text`, which must extend the text indexed so far."""
        for place in range(self.known, len(text)):
            for size in self.sizes:
                if size <= place:
                    self.after[tuple(text[place - size : place])] = place
        self.known = len(text)

    def match(self, text: Sequence[int]) -> tuple[int, int] | None:
        """Return (place of what followed, tokens that agree) of the longest match, or None."""
        for size in self.sizes:
            if size <= len(text):
                place = self.after.get(tuple(text[len(text) - size :]))
                if place is not None:
                    return place, size
        return None

    def continuation(self, text: Sequence[int], limit: int, trust: int) -> list[int]:
        """Return what followed the longest match, at most `trust` times its length."""
        match = self.match(text) if limit else None
        if match is None:
            return []
        place, size = match
        tokens: list[int] = []
        for at in range(place, place + min(limit, trust * size)):
            tokens.append(text[at] if at < len(text) else tokens[at - len(text)])
        return tokens
