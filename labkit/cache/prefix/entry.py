"""Describe one stored prefix: its identity, tokens, source documents and pages.

An identity is a tenant, an authorization scope and a model, each a separate field.
Fields are compared one by one and never joined into one string, so a tenant "X" cannot
be confused with an adapter "X". The pages are a fork of the cache that computed them
and share its blocks. No `repr` shows tokens, tenants or documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from labkit.cache.paged.cache import PagedCache
from labkit.errors import BadRequest

Tokens = tuple[int, ...]
Documents = Mapping[str, int] | Iterable[str] | None


@dataclass(frozen=True)
class Fingerprint:
    """Everything besides the tokens that determines their keys and values.

    `labkit.model.fingerprint` computes it for a model.
    """

    weights: str  # a digest of all numbers
    adapters: tuple[str, ...] = ()
    formats: str = ""  # how weights are stored and computed
    settings: str = ""  # the configuration, RoPE included

    def __post_init__(self) -> None:
        parts = (self.weights, *self.adapters, self.formats, self.settings)
        if not self.weights or not all(isinstance(part, str) for part in parts):
            raise BadRequest(
                "A fingerprint consists of texts, and its weights are not empty; use "
                "labkit.model.fingerprint."
            )


@dataclass(frozen=True, repr=False)
class Identity:
    """The owner of an entry: tenant, scope and model.

    A `tenant` of None means that the entry is public for everyone with this model.
    """

    tenant: str | None
    scope: str
    model: Fingerprint

    def __post_init__(self) -> None:
        named = self.tenant is None or (isinstance(self.tenant, str) and self.tenant)
        if not (named and isinstance(self.scope, str) and isinstance(self.model, Fingerprint)):
            raise BadRequest(
                "An identity needs a tenant (text, not empty), a scope (text) and a Fingerprint."
            )

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Identity:
        fields = json.loads(text)
        model = fields["model"] | {"adapters": tuple(fields["model"]["adapters"])}
        return cls(fields["tenant"], fields["scope"], Fingerprint(**model))


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of `a` and `b`."""
    if tuple(a[: len(b)]) == tuple(b[: len(a)]):
        return min(len(a), len(b))
    return next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)


@dataclass(eq=False, repr=False)
class Entry:
    """One stored prefix, in memory, on disk, or both.

    `documents` maps the name of each source document to the first token that it could
    influence. `layout` describes how the pool stores a token. If `pages` is None, the
    entry is only on disk. If `file` is None, it is only in memory. If `expires` is
    None, it does not expire.
    """

    identity: Identity
    tokens: Tokens
    documents: dict[str, int]
    created: float
    expires: float | None
    layout: str
    pages: PagedCache = None  # type: ignore[assignment]
    file: str = None  # type: ignore[assignment]
    used: int = 0  # larger: used later

    def alive(self, now: float) -> bool:
        """Return False after `expires`, or if the clock moved back before `created`."""
        return self.created <= now and (self.expires is None or now < self.expires)

    def new_documents(self, documents: Mapping[str, int]) -> dict[str, int]:
        """Return the documents that are new to the entry or start earlier."""
        return {
            name: start
            for name, start in documents.items()
            if start < min(len(self.tokens), self.documents.get(name, start + 1))
        }

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens, and the documents that they were built on."""
        self.pages.rewind(length)
        self.tokens = self.tokens[:length]
        self.documents = {name: start for name, start in self.documents.items() if start < length}


@dataclass
class Lease:
    """Result of a look-up: a cache with the first `length` tokens (0: a miss)."""

    cache: PagedCache = field(repr=False)
    length: int
    documents: dict[str, int] = field(repr=False)
    epoch: int  # how often the store had forgotten something before the look-up
