"""The one exception for a user's mistake, and the declarative checks that raise it.

    @dataclass(frozen=True)
    class Window:
        size: int
        share: float = 0.5
        kind: str = "sliding"

        def __post_init__(self):
            check_fields(self, size=Whole(1), share=Number(above=0, most=1))
            check_fields(self, kind=OneOf("sliding", "chunked"))

Every error in labkit says in one sentence what was given, what is allowed and what to
do. The command line prints that sentence and exits with status 2; a notebook shows it
as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from operator import index
from typing import Any


class BadRequest(ValueError):
    """A request is not valid; nothing has been changed."""


@dataclass(frozen=True)
class Rule:
    """The values that a field may have: in words, and as a test that never raises."""

    allowed: str
    accepts: Callable[[Any], bool]


def check_fields(self: object, **rules: Rule) -> None:
    """Check attributes; raise BadRequest for the first that breaks its rule."""
    for name, rule in rules.items():
        value = getattr(self, name)
        if not rule.accepts(value):
            raise BadRequest(f"{name} is {value!r}; give {rule.allowed}.")


def Whole(least: int | None = None, most: int | None = None) -> Rule:
    """A whole number from `least` to `most`; booleans are not numbers."""
    inside = _inside(least, most, None, None)
    return Rule(
        "a whole number" + _range(least, most, None, None),
        lambda value: isinstance(value, Integral) and type(value) is not bool and inside(value),
    )


def Number(
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Rule:
    """A finite number; `least` and `most` are allowed, `above` and `below` are not."""
    inside = _inside(least, most, above, below)
    return Rule(
        "a number" + _range(least, most, above, below),
        lambda value: (
            isinstance(value, Real)
            and type(value) is not bool
            and math.isfinite(value)
            and inside(value)
        ),
    )


def OneOf(*choices: object) -> Rule:
    """One of the given values, of the same type (1 is not True)."""
    return Rule(
        "one of " + ", ".join(map(str, choices)),
        lambda value: any(type(value) is type(one) and value == one for one in choices),
    )


def Text() -> Rule:
    """A text that is not empty."""
    return Rule("a text", lambda value: isinstance(value, str) and bool(value))


def OrNone(rule: Rule) -> Rule:
    """Any value that `rule` allows, or None."""
    return Rule(f"{rule.allowed}, or None", lambda value: value is None or rule.accepts(value))


def whole_number(value: object, what: str, least: int | None = None) -> int:
    """Return `value` as an int of at least `least`.

    Raises BadRequest for anything that is not a whole number: booleans, fractions,
    text.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise BadRequest(f"{what} is {value!r}; give a whole number.") from None
    if least is not None and number < least:
        raise BadRequest(f"{what} is {number}; give at least {least}.")
    return number


def _inside(least, most, above, below) -> Callable[[Any], bool]:
    return lambda value: (
        (least is None or value >= least)
        and (most is None or value <= most)
        and (above is None or value > above)
        and (below is None or value < below)
    )


def _range(least, most, above, below) -> str:
    if least is not None and most is not None:
        return f" from {least} to {most}"
    bounds = {"of at least": least, "above": above, "of at most": most, "below": below}
    words = [f"{word} {bound}" for word, bound in bounds.items() if bound is not None]
    return " " + " and ".join(words) if words else ""
