"""Whose a stored prefix is: tenant, authorization scope and model, each a field of its own.

Fields are compared one by one and written down by name, so a tenant "X" and an adapter "X" never meet, whatever the
words are; there is no joined string and no hash that two different identities could share. `repr` shows none of it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from labkit.errors import BadRequest


@dataclass(frozen=True)
class Fingerprint:
    """What decides the keys and values of a token besides the tokens: made by `labkit.model.fingerprint`."""

    weights: str  # a digest of all numbers
    adapters: tuple[str, ...] = ()
    formats: str = ""  # how weights are held and computed
    settings: str = ""  # the configuration, RoPE included

    def __post_init__(self):
        if not all(isinstance(part, str) for part in (self.weights, *self.adapters, self.formats, self.settings)):
            raise BadRequest("A fingerprint is made of texts; take it from labkit.model.fingerprint.")
        if not self.weights:
            raise BadRequest("The fingerprint names no weights; take it from labkit.model.fingerprint.")


@dataclass(frozen=True, repr=False)
class Identity:
    """`tenant` None: declared public by the server for everyone who uses this model."""

    tenant: str | None
    scope: str
    model: Fingerprint

    def __post_init__(self):
        if self.tenant is not None and not (isinstance(self.tenant, str) and self.tenant):
            raise BadRequest("A tenant is a text that is not empty, set by the server; nothing else identifies one.")
        if not isinstance(self.scope, str) or not isinstance(self.model, Fingerprint):
            raise BadRequest("An identity is a tenant and a scope as texts and a Fingerprint; give those.")

    def public(self) -> Identity:
        """What is declared for everyone, for the same model."""
        return Identity(None, "", self.model)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Identity:
        found = json.loads(text)
        model = dict(found["model"])
        return cls(found["tenant"], found["scope"], Fingerprint(**model | {"adapters": tuple(model["adapters"])}))

    def __repr__(self) -> str:
        return f"Identity({'public' if self.tenant is None else 'of one tenant'})"
