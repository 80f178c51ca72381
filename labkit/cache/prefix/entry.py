"""Describe one stored prefix: its identity, tokens, source documents and pages.

An identity is a tenant, an authorization scope and a model, each a field of its own.
Fields are compared one by one and never joined into one string, so a tenant "X" cannot
be confused with an adapter "X". Pages are a fork of the cache that computed them and
share its blocks. `repr` shows sizes, never content.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from labkit.cache.paged.cache import PagedCache
from labkit.errors import BadRequest, whole_number

Tokens = tuple[int, ...]
Documents = Mapping[str, int] | Iterable[str] | None


@dataclass(frozen=True)
class Fingerprint:
    """Everything besides the tokens that determines their keys and values.

    See `labkit.model.fingerprint`.
    """

    weights: str  # a digest of all numbers
    adapters: tuple[str, ...] = ()
    formats: str = ""  # how weights are stored and computed
    settings: str = ""  # the configuration, RoPE included

    def __post_init__(self) -> None:
        parts = (self.weights, *self.adapters, self.formats, self.settings)
        if not self.weights or not all(isinstance(part, str) for part in parts):
            raise BadRequest(
                "A fingerprint names weights, and its parts are texts; take it from "
                "labkit.model.fingerprint."
            )


@dataclass(frozen=True, repr=False)
class Identity:
    """The owner of an entry: tenant, scope and model.

    `tenant` None: the server declared it public for everyone with this model.
    """

    tenant: str | None
    scope: str
    model: Fingerprint

    def __post_init__(self) -> None:
        named = self.tenant is None or (isinstance(self.tenant, str) and self.tenant)
        if not (named and isinstance(self.scope, str) and isinstance(self.model, Fingerprint)):
            raise BadRequest(
                "An identity is a tenant (a text that is not empty), a scope (a text) and a "
                "Fingerprint, all set by the server."
            )

    def public(self) -> Identity:
        """Return the identity of public entries of the same model."""
        return Identity(None, "", self.model)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Identity:
        fields = json.loads(text)
        model = fields["model"] | {"adapters": tuple(fields["model"]["adapters"])}
        return cls(fields["tenant"], fields["scope"], Fingerprint(**model))

    def __repr__(self) -> str:
        return f"Identity({'public' if self.tenant is None else 'of one tenant'})"


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of `a` and `b`."""
    if tuple(a[: len(b)]) == tuple(b[: len(a)]):
        return min(len(a), len(b))
    return next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)


def checked_tokens(tokens: Iterable[int]) -> Tokens:
    """Return the tokens as a tuple of ints; raise BadRequest if there are none."""
    tokens = tuple(whole_number(token, "A token") for token in tokens)
    if not tokens:
        raise BadRequest("There are no tokens; give those of the whole prompt.")
    return tokens


def checked_documents(documents: Documents) -> dict[str, int]:
    """Return {name: first token that the document could influence}.

    For a list of names, every start is 0.
    """
    names = documents if isinstance(documents, Mapping) else dict.fromkeys(documents or (), 0)
    for name, start in names.items():
        texts = isinstance(name, str) and not isinstance(documents, str)
        if not texts or whole_number(start, "A document's first token") < 0:
            raise BadRequest(
                "Documents are a list of names, or {name: first token that it could influence}, "
                "counted from 0."
            )
    return dict(names)


@dataclass(eq=False, repr=False)
class Entry:
    """`pages` None: on disk only.

    `file` None: in memory only. `expires` None: never.
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
        """Return False after `expires`, or if the clock moved back."""
        return self.created <= now and (self.expires is None or now < self.expires)

    def news(self, documents: Mapping[str, int]) -> dict[str, int]:
        """Return documents that the entry lacks or that start at an earlier token."""
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

    def __repr__(self) -> str:
        places = [name for name, at in (("memory", self.pages), ("disk", self.file)) if at]
        return f"Entry({len(self.tokens)} tokens in {' and '.join(places) or 'no place'})"


@dataclass(repr=False)
class Lease:
    """Result of a look-up: a cache with the first `length` tokens (0: a miss)."""

    cache: PagedCache
    length: int
    documents: dict[str, int]
    epoch: int

    def __repr__(self) -> str:
        return f"Lease({self.length} tokens)"


@dataclass
class Counters:
    """Counts of the events in a prefix store."""

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
