"""Speculative decoding: drafters by name, and the loop that they share.

A new drafter is one file and one line here: a function that makes it for a target. Tests, benches and commands read this
table. The name of a number format, such as "int4_g32_zp", is a drafter too: the target itself in that format.
"""

from __future__ import annotations

from collections.abc import Callable

from labkit.errors import BadRequest
from labkit.speculate.draft import NOTHING, Draft, Drafter
from labkit.speculate.lookup import Lookup
from labkit.speculate.loop import DrafterFailed, decode, generate
from labkit.speculate.report import Speculated

DRAFTERS: dict[str, Callable[..., Drafter]] = {  # name -> what makes it for a target
    "lookup": lambda target: Lookup(),
}


def make_drafter(name: str, target) -> Drafter:
    """The drafter of that name for `target`."""
    if name in DRAFTERS:
        return DRAFTERS[name](target)
    raise BadRequest(f"There is no drafter {name!r}; choose one of {', '.join(DRAFTERS)}, or a number format.")


__all__ = ["DRAFTERS", "NOTHING", "Draft", "Drafter", "DrafterFailed", "Lookup", "Speculated", "decode", "generate",
           "make_drafter"]
