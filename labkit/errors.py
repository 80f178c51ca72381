"""The one exception for a user's mistake, and the check that most often raises it.

Every refusal in labkit says, in one sentence, what was given, what is allowed and what to do.
The command line turns it into that sentence and exit status 2; a notebook shows it as it is.
"""

from __future__ import annotations

from operator import index


class BadRequest(ValueError):
    """A request that cannot be carried out as it was made; nothing has been changed."""


def whole_number(value: object, what: str, least: int | None = None) -> int:
    """`value` as an int of at least `least`, or a refusal: booleans, fractions and text are not counts."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)
    except TypeError:
        raise BadRequest(f"{what} is {value!r}; give a whole number.") from None
    if least is not None and number < least:
        raise BadRequest(f"{what} is {number}; give at least {least}.")
    return number
