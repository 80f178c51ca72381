"""The declarative field check: one sentence that names the field, the value and what is allowed."""

from dataclasses import dataclass

import numpy as np
import pytest

from labkit.errors import BadRequest, Number, OneOf, OrNone, Text, Whole, check_fields


@dataclass
class Given:
    value: object


GOOD = [
    (Whole(), (-3, 0, np.int64(5))),
    (Whole(1, 8), (1, 8)),
    (Number(), (-0.5, 2, np.float32(1.5))),
    (Number(0), (0, 1e300)),
    (Number(above=0, most=1), (1e-9, 1)),
    (OneOf("a", "b"), ("a",)),
    (Text(), ("x",)),
    (OrNone(Whole(1)), (None, 1)),
]
BAD = [
    (Whole(), (1.0, "1", True, None, [1]), "a whole number"),
    (Whole(1), (0, -1), "a whole number of at least 1"),
    (Whole(1, 8), (0, 9), "a whole number from 1 to 8"),
    (Number(), (float("nan"), float("inf"), "1", False, 1j, None), "a number"),
    (Number(above=0, most=1), (0, 1.1), "a number above 0 and of at most 1"),
    (Number(0, below=1), (1, -0.1), "a number of at least 0 and below 1"),
    (OneOf("a", "b"), ("c", None, ["a"]), "one of a, b"),
    (OneOf(1, 2), (True,), "one of 1, 2"),
    (Text(), ("", 5), "a text"),
    (OrNone(Whole(1)), (0,), "a whole number of at least 1, or None"),
]


def test_every_rule_accepts_what_it_says():
    for rule, values in GOOD:
        for value in values:
            check_fields(Given(value), value=rule)


def test_every_rule_rejects_the_rest_in_one_sentence():
    for rule, values, allowed in BAD:
        for value in values:
            with pytest.raises(BadRequest) as error:
                check_fields(Given(value), value=rule)
            assert str(error.value) == f"value is {value!r}; give {allowed}."
