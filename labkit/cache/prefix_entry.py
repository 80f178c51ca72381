"""One stored prefix: tokens, whose they are, what they were built on, and the pages that hold their keys and values.

Pages are a fork: they share blocks with whoever computed them, and copy nothing. `repr` shows sizes, never content.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from labkit.cache.paged import PagedCache
from labkit.cache.prefix_identity import Identity
from labkit.errors import BadRequest, whole_number

Tokens = tuple[int, ...]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens are equal, compared one by one."""
    if tuple(a[: len(b)]) == tuple(b[: len(a)]):
        return min(len(a), len(b))
    return next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)


def checked_tokens(tokens: Iterable[int]) -> Tokens:
    tokens = tuple(whole_number(token, "A token") for token in tokens)
    if not tokens:
        raise BadRequest("There are no tokens; give those of the whole prompt.")
    return tokens


def checked_documents(documents: Mapping[str, int] | Iterable[str] | None) -> dict[str, int]:
    """Names of documents -> the first token that was computed with the document in view (0 where only names are given)."""
    if isinstance(documents, str):
        raise BadRequest("documents is one text; give a list of names, or {name: first token that it could influence}.")
    found = dict(documents) if isinstance(documents, Mapping) else dict.fromkeys(documents or (), 0)
    for name, start in found.items():
        if not isinstance(name, str) or whole_number(start, "A document's first token") < 0:
            raise BadRequest("A document is a name as text and the first token built on it, from 0 up.")
    return found


@dataclass(eq=False, repr=False)
class Entry:
    """`pages` None: on disk only. `file` None: in memory only. `expires` None: never."""

    identity: Identity
    tokens: Tokens
    documents: dict[str, int]
    created: float
    expires: float | None
    layout: str
    pages: PagedCache | None = None
    file: str | None = None
    used: int = field(default=0)

    def alive(self, now: float) -> bool:
        """A clock that was set back ends an entry as well: its age is not known then."""
        return self.created <= now and (self.expires is None or now < self.expires)

    def news(self, documents: Mapping[str, int]) -> dict[str, int]:
        """What of these documents the entry does not know yet: names, or an earlier token that they could influence."""
        return {name: start for name, start in documents.items() if start < min(len(self.tokens), self.documents.get(name, start + 1))}

    def add(self, documents: Mapping[str, int]) -> None:
        self.documents |= self.news(documents)

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens, and the documents that they were built on."""
        self.pages.rewind(length)
        self.tokens = self.tokens[:length]
        self.documents = {name: start for name, start in self.documents.items() if start < length}

    def __repr__(self) -> str:
        where = " and ".join(name for name, there in (("memory", self.pages), ("disk", self.file)) if there)
        return f"Entry({len(self.tokens)} tokens in {where or 'no place'})"


@dataclass(repr=False)
class Lease:
    """What a look-up gives: a cache of one row that holds the first `length` tokens, 0 after a miss."""

    cache: PagedCache
    length: int
    documents: dict[str, int]
    epoch: int

    def __repr__(self) -> str:
        return f"Lease({self.length} tokens)"


@dataclass
class Counters:
    """Everything that happened, as numbers."""

    hits: int = 0
    misses: int = 0
    tokens_asked: int = 0
    tokens_found: int = 0
    stored: int = 0
    evictions: int = 0
    spilled: int = 0
    loaded: int = 0
    expired: int = 0
    forgotten: int = 0
    stale: int = 0  # computed before something was forgotten, so not stored
    too_large: int = 0
    lost: int = 0  # evicted when the disk could not take them
    refused: int = 0  # files that were not what was written
