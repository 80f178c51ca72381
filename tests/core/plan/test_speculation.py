"""Compare the formulas of speculative decoding with an enumeration of outcomes."""

from itertools import product

import pytest

from labkit.errors import BadRequest
from labkit.plan.time import (
    SpeculationCosts,
    best_draft_length,
    break_even_alpha,
    expected_accepted_length,
    speculative_speedup,
)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_accepted_length_is_the_mean_over_all_outcomes(alpha, length):
    mean = 0.0
    for kept in product([True, False], repeat=length):
        weight = 1.0
        for one in kept:
            weight *= alpha if one else 1 - alpha
        run = next((i for i, one in enumerate(kept) if not one), length)
        mean += weight * (run + 1)
    assert expected_accepted_length(alpha, length) == pytest.approx(mean)


def test_speedup_is_tokens_over_cost():
    costs = SpeculationCosts(0.25, (1.0, 1.1, 1.2, 1.3))
    assert speculative_speedup(0.5, 3, costs) == pytest.approx(
        (1 + 0.5 + 0.25 + 0.125) / (0.75 + 1.3)
    )
    assert speculative_speedup(0.9, 0, costs) == 1.0
    assert costs.verify_ratio(7) == pytest.approx(1.6)  # continues on the line


def test_the_best_length_grows_with_alpha_and_shrinks_with_cost():
    cheap, dear = SpeculationCosts(0.05), SpeculationCosts(0.5)
    lengths = [best_draft_length(alpha, cheap) for alpha in (0.0, 0.3, 0.6, 0.9)]
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[-1] > 4
    assert best_draft_length(0.6, dear) < best_draft_length(0.6, cheap)
    for alpha in (0.2, 0.7):
        best = best_draft_length(alpha, cheap, 12)
        assert speculative_speedup(alpha, best, cheap) == max(
            speculative_speedup(alpha, n, cheap) for n in range(13)
        )


def test_at_break_even_the_speedup_is_one():
    costs = SpeculationCosts(0.3, (1.0, 1.1, 1.2, 1.3))
    for length in (1, 2, 3):
        alpha = break_even_alpha(length, costs)
        assert speculative_speedup(alpha, length, costs) == pytest.approx(1.0)
        assert (
            speculative_speedup(alpha - 0.05, length, costs)
            < 1
            < speculative_speedup(alpha + 0.05, length, costs)
        )
    assert break_even_alpha(2, SpeculationCosts(1.5)) is None
    assert break_even_alpha(1, SpeculationCosts(0.0, (1.0, 1.0))) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    "call",
    [
        lambda: SpeculationCosts(-0.1),
        lambda: SpeculationCosts(0.1, ()),
        lambda: expected_accepted_length(1.2, 2),
        lambda: expected_accepted_length(0.5, -1),
    ],
)
def test_numbers_out_of_range_raise(call):
    with pytest.raises(BadRequest):
        call()
