"""The exception for a user's mistake, and checks of fields that raise it.

    @dataclass(frozen=True)
    class Window:
        size: int
        share: float = 0.5
        kind: str = "sliding"

        def __post_init__(self):
            check_fields(self, size=Whole(1), share=Number(above=0, most=1))
            check_fields(self, kind=OneOf("sliding", "chunked"))

Every error in labkit says what was given, what is allowed and what to do, in one or two
sentences. The command line prints the error and exits with status 2. A notebook shows
it as it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any


class BadRequest(ValueError):
    """A request is not valid; nothing has been changed."""


@dataclass(frozen=True)
class Rule:
    """The values that a field may have.

    allowed: the values in words, for the error.
    accepts: a function that tests a value and never raises an error.
    """

    allowed: str
    accepts: Callable[[Any], bool]


def check_fields(self: object, **rules: Rule) -> None:
    """Check the named attributes of `self` against their rules.

    Raises BadRequest for the first attribute that breaks its rule.
    """
    for name, rule in rules.items():
        value = getattr(self, name)
        if not rule.accepts(value):
            raise BadRequest(f"{name} is {value!r}; give {rule.allowed}.")


def Whole(least: int | None = None, most: int | None = None) -> Rule:
    """Allow whole numbers from `least` to `most`; None means no limit.

    Booleans are not numbers.
    """
    return _bounded("a whole number", Integral, least, most)


def Number(
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Rule:
    """Allow finite numbers.

    The limits `least` and `most` are allowed values; `above` and `below` are not.
    """
    return _bounded("a number", Real, least, most, above, below)


def _bounded(what: str, kind: type, least, most, above=None, below=None) -> Rule:
    bounds: list[tuple[str, Callable[[Any, Any], bool], Any]] = [
        ("of at least", operator.ge, least),
        ("above", operator.gt, above),
        ("of at most", operator.le, most),
        ("below", operator.lt, below),
    ]
    bounds = [bound for bound in bounds if bound[2] is not None]
    words = " and ".join(f"{word} {limit}" for word, _, limit in bounds)
    if least is not None and most is not None:
        words = f"from {least} to {most}"
    return Rule(
        f"{what} {words}".rstrip(),
        lambda value: (
            isinstance(value, kind)
            and type(value) is not bool
            and abs(value) < math.inf  # type: ignore[arg-type]
            and all(compare(value, limit) for _, compare, limit in bounds)
        ),
    )


def OneOf(*choices: object) -> Rule:
    """Allow the given values, each with the same type (1 is not True)."""
    return Rule(
        "one of " + ", ".join(map(str, choices)),
        lambda value: any(type(value) is type(one) and value == one for one in choices),
    )


def Text() -> Rule:
    """Allow a text that is not empty."""
    return Rule("a text", lambda value: isinstance(value, str) and bool(value))


def OrNone(rule: Rule) -> Rule:
    """Allow None and every value that `rule` allows."""
    return Rule(f"{rule.allowed}, or None", lambda value: value is None or rule.accepts(value))


def whole_number(value: object, what: str, least: int | None = None) -> int:
    """Return `value` as an int, for example from a NumPy integer or a tensor.

    Raises BadRequest if `value` is not a whole number of at least `least`. Booleans,
    fractions and texts are not whole numbers. `what` names the value in the error.
    """
    if type(value) is int and (least is None or value >= least):  # fast, for checks in each pass
        return value
    rule, number = Whole(least), value
    with suppress(TypeError):
        number = value if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    if not rule.accepts(number):
        raise BadRequest(f"{what} is {value!r}; give {rule.allowed}.")
    return number  # type: ignore[return-value]
