"""Draft by look-up: the tokens that followed the last tokens before may follow them again.

No model is needed. The drafter looks for an earlier occurrence of the last n tokens in
the prompt and the new text, the largest n first. Its draft is the tokens that followed
the latest occurrence (Saxena 2023, "prompt lookup decoding"). If the draft reaches the
end of the text, it continues from its own start, so it can repeat a loop. A match of n
tokens allows 2 n drafted tokens, because short matches are often chance and long ones
hardly ever.

An index maps n tokens to the place after their latest occurrence. It grows by a few
entries per token, so a step costs a few look-ups at any text length. The end of the text
is indexed only when a token follows it, so it never matches itself.

It pays for copied text, edits, code and lists. When it loses: free prose, in which it
drafts little and wrong drafts cost a pass over more tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.errors import BadRequest, Whole, check_fields
from labkit.generate.drafter import Draft, Drafter


class Lookup(Drafter):
    """Draft from the longest match of `shortest` to `longest` tokens.

    `trust` is the maximum number of drafted tokens per matching token.
    """

    name = "lookup"

    def __init__(self, longest: int = 8, shortest: int = 2, trust: int = 2):
        self.longest, self.shortest, self.trust = longest, shortest, trust
        check_fields(self, longest=Whole(1), shortest=Whole(1), trust=Whole(1))
        if shortest > longest:
            raise BadRequest(f"shortest is {shortest}; give at most longest, which is {longest}.")

    def begin(self, request, rows, hidden=None) -> None:
        self.indices = [Index(self.longest, self.shortest) for _ in rows]

    def propose(self, rows, limits) -> list[Draft]:
        each = zip(self.indices, rows, limits)
        return [Draft(index.draft(row.history, limit, self.trust)) for index, row, limit in each]

    def select(self, keep) -> None:
        self.indices = [self.indices[i] for i in keep]


class Index:
    """Map each sequence of `shortest` to `longest` tokens to the place after it.

    If a sequence occurs several times, the last place counts.
    """

    def __init__(self, longest: int, shortest: int):
        self.sizes = range(longest, shortest - 1, -1)
        self.after: dict[tuple[int, ...], int] = {}
        self.known = 0  # the number of tokens that are indexed

    def extend(self, text: Sequence[int]) -> None:
        """Index the new tokens of `text`, which starts with the text indexed before."""
        for place in range(self.known, len(text)):
            for size in self.sizes:
                if size <= place:
                    self.after[tuple(text[place - size : place])] = place
        self.known = len(text)

    def match(self, text: Sequence[int]) -> tuple[int, int] | None:
        """Return the place after the longest match and its number of tokens, or None."""
        for size in self.sizes:
            if size <= len(text):
                place = self.after.get(tuple(text[len(text) - size :]))
                if place is not None:
                    return place, size
        return None

    def draft(self, text: Sequence[int], limit: int, trust: int) -> list[int]:
        """Index `text`; return the tokens that followed the longest match.

        There are at most `limit` tokens, and at most `trust` per matching token.
        """
        self.extend(text)
        match = self.match(text) if limit else None
        if match is None:
            return []
        place, size = match
        tokens: list[int] = []
        for at in range(place, place + min(limit, trust * size)):
            tokens.append(text[at] if at < len(text) else tokens[at - len(text)])
        return tokens
