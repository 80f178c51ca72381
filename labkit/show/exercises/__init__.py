"""The checks of the notebooks' exercises; `labkit.show.exercises.check` says how one is made."""

from labkit.show.exercises.boundary import check_computed, check_may_share, check_revoke
from labkit.show.exercises.check import Outcome, check
from labkit.show.exercises.fewer_bits import (
    check_bits_all_in,
    check_most_speedup,
    check_round_trip,
    check_where_it_stops,
)
from labkit.show.exercises.guess_and_verify import (
    check_best_length,
    check_break_even,
    check_own_drafter,
    check_refused,
    check_tokens_a_pass,
)
from labkit.show.exercises.kv_cache import (
    check_bytes_per_token,
    check_positions,
    check_two_answers,
    check_what_fits,
)
from labkit.show.exercises.last_mile import check_memory_limit, check_packed_line, check_part_for_free
from labkit.show.exercises.make_a_draft import check_draft_worth, check_influence, check_two_of_four
from labkit.show.exercises.pages import check_blocks_of_forks, check_copy_on_write, check_waste
from labkit.show.exercises.smaller_cache import (
    check_kv_bits,
    check_per_channel,
    check_window,
)
from labkit.show.exercises.what_it_costs import check_can_fall, check_flips, check_smallest
from labkit.show.exercises.what_to_lose import (
    check_compensate,
    check_kl,
    check_rule_of_four,
    check_spend,
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
    "check_best_length",
    "check_bits_all_in",
    "check_break_even",
    "check_can_fall",
    "check_flips",
    "check_smallest",
    "check_blocks_of_forks",
    "check_bytes_per_token",
    "check_compensate",
    "check_computed",
    "check_copy_on_write",
    "check_decode_limit",
    "check_draft_worth",
    "check_first_token",
    "check_influence",
    "check_kl",
    "check_kv_bits",
    "check_may_share",
    "check_memory_limit",
    "check_most_speedup",
    "check_own_drafter",
    "check_packed_line",
    "check_part_for_free",
    "check_per_channel",
    "check_positions",
    "check_price",
    "check_revoke",
    "check_refused",
    "check_ridge_batch",
    "check_round_trip",
    "check_rule_of_four",
    "check_spend",
    "check_tokens_a_pass",
    "check_two_answers",
    "check_waste",
    "check_two_of_four",
    "check_what_fits",
    "check_where_it_stops",
    "check_window",
]
