"""The checks of the notebooks' exercises; `labkit.show.exercises.check` says how one is made."""

from labkit.show.exercises.check import Outcome, check
from labkit.show.exercises.kv_cache import (
    check_bytes_per_token,
    check_positions,
    check_two_answers,
    check_what_fits,
)
from labkit.show.exercises.where_time_goes import (
    check_decode_limit,
    check_first_token,
    check_price,
    check_ridge_batch,
)

__all__ = [
    "Outcome",
    "check",
    "check_bytes_per_token",
    "check_decode_limit",
    "check_first_token",
    "check_positions",
    "check_price",
    "check_ridge_batch",
    "check_two_answers",
    "check_what_fits",
]
