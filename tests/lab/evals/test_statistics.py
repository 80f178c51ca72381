"""Intervals and verdicts compared with published values, enumeration and simulated runs."""

import math
from fractions import Fraction

import numpy as np
import pytest

from labkit.errors import BadRequest
from labkit.lab.evals.statistics import (
    at_floor,
    bootstrap,
    compare_scores,
    compare_values,
    mcnemar,
    smallest_difference,
    wilson,
)


def runs(n, right, fell=0, rose=0, errors=0):
    """Two runs: `right` of n are right before, `fell` of them become wrong, `rose` others become right."""
    before = {f"item {i}": i < right for i in range(n)}
    after = {f"item {i}": fell <= i < right + rose for i in range(n)}
    after |= {f"item {i}": None for i in range(n - errors, n)}
    return before, after


# Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
@pytest.mark.parametrize(
    "right, n, low, high",
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_interval(right, n, low, high):
    found = wilson(right, n)
    assert (round(found.low, 4), round(found.high, 4), found.value, found.n) == (
        low,
        high,
        right / n,
        n,
    )
    mirrored = wilson(n - right, n)
    assert mirrored.high == pytest.approx(1 - found.low) and mirrored.low == pytest.approx(
        1 - found.high
    )


@pytest.mark.parametrize("right, n", [(0, 0), (5, 4), (-1, 4)])
def test_invalid_counts_raise(right, n):
    with pytest.raises(BadRequest, match="not a proportion"):
        wilson(right, n)


def test_mcnemar_gives_the_enumerated_probability():
    for flips in range(16):
        for fell in range(flips + 1):
            as_uneven = [k for k in range(flips + 1) if abs(2 * k - flips) >= abs(2 * fell - flips)]
            exact = Fraction(sum(math.comb(flips, k) for k in as_uneven), 2**flips)
            assert mcnemar(fell, flips - fell) == pytest.approx(float(exact), rel=1e-12)
    assert mcnemar(150, 86) == pytest.approx(3.7e-5, rel=0.03)  # the counts of Agresti, table 10.1
    assert 0 < mcnemar(3000, 2000) < 1e-40  # no overflow where n is a whole benchmark


def test_the_smallest_difference_is_the_least_that_mcnemar_accepts():
    assert smallest_difference(164) == 6 / 164  # the popular two points of HumanEval cannot be seen
    assert smallest_difference(5) is None
    for flips in range(6, 40):
        least = round(smallest_difference(100, flips) * 100)
        called = [
            d
            for d in range(flips + 1)
            if (flips - d) % 2 == 0 and mcnemar((flips - d) // 2, (flips + d) // 2) < 0.05
        ]
        assert least == min(called)


def test_verdicts_of_right_and_wrong():
    assert compare_scores(*runs(164, 100, fell=20, rose=5)).verdict == "worse"
    assert compare_scores(*runs(164, 100, fell=5, rose=20)).verdict == "better"
    same = compare_scores(*runs(164, 100, fell=3, rose=1))
    assert same.verdict == "not decidable with n = 164" and same.smallest == 6 / 164
    assert (same.fell, same.rose, same.ties, same.difference) == (3, 1, 160, -2 / 164)
    assert (
        compare_scores(*runs(164, 100, fell=5)).verdict == "not decidable with n = 164"
    )  # p = 0.0625
    assert compare_scores(*runs(164, 100, fell=6)).verdict == "worse"  # p = 0.03
    assert (
        compare_scores(*runs(164, 5, fell=5)).verdict == "at the floor"
    )  # five lost of five: p = 0.06
    assert compare_scores(*runs(164, 6, fell=6)).verdict == "worse"
    assert compare_scores(*runs(281, 65, fell=30, rose=10), chance=0.25).verdict == "at the floor"
    assert (
        compare_scores(*runs(281, 65, fell=0, rose=60), chance=0.25).verdict == "better"
    )  # up from the floor
    assert (
        compare_scores(*runs(281, 40, fell=0, rose=10), chance=0.25).verdict == "at the floor"
    )  # from below to chance


def test_an_item_without_a_score_is_counted_and_not_wrong():
    found = compare_scores(*runs(20, 20, errors=8))
    assert (found.errors, found.n, found.fell, found.changed) == (8, 12, 0, 1.0)
    assert found.verdict == "not decidable with n = 12"
    values = compare_values({"a": 1.0, "b": None, "c": 2.0}, {"a": 1.0, "b": 3.0, "c": None})
    assert (values.errors, values.n, values.ties) == (2, 1, 1)
    with pytest.raises(BadRequest, match="scored in both runs"):
        compare_scores({"a": None}, {"a": True})


def test_the_interval_of_a_difference_excludes_zero_exactly_when_mcnemar_decides():
    for n in (6, 12, 40):
        for fell in range(13):
            for rose in range(min(13, n - fell + 1)):
                if fell + rose > n:
                    continue
                before = {i: i < fell for i in range(n)}
                after = {i: fell <= i < fell + rose for i in range(n)}
                found = compare_scores(before, after)
                assert -1 <= found.low <= found.difference <= found.high <= 1
                assert (found.low > 0 or found.high < 0) == (mcnemar(fell, rose) < 0.05)


def test_intervals_contain_the_truth_as_often_as_promised():
    random, n = np.random.default_rng(0), 60
    held = {"scores": 0, "values": 0}
    for _ in range(200):
        fell, rose, _ = random.multinomial(n, [0.2, 0.1, 0.7])
        found = compare_scores(*runs(n, 30, int(fell), int(min(rose, 30))))
        held["scores"] += found.low <= -0.1 <= found.high
        step = random.exponential(1.0, n) - 0.5  # skew, mean 0.5
        found = bootstrap(step, seed=1, draws=400)
        held["values"] += found.low <= 0.5 <= found.high
    assert held["scores"] >= 190
    assert 180 <= held["values"] <= 197  # a percentile interval of 60 skewed items: about 93 %


def test_the_bootstrap_repeats_and_gives_the_normal_interval_for_normal_values():
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    found = bootstrap(values)
    half = 1.96 * values.std() / 20
    assert found.low == pytest.approx(found.value - half, abs=0.02)
    assert found.high == pytest.approx(found.value + half, abs=0.02)
    assert found == bootstrap(values) != bootstrap(values, seed=1)
    found = bootstrap(
        [1.0, 9.0] * 3, [1.0, 3.0] * 3
    )  # ratios of sums, not means of ratios: (6 + 8 k) / (6 + 2 k) of k nines
    assert (found.low, found.value, found.high) == (
        14 / 8,
        2.5,
        46 / 16,
    )  # k = 0 and k = 6 come once in 64 draws each


def test_verdicts_of_values_use_the_direction_of_the_metric():
    bits = {i: 100.0 + i for i in range(30)}
    more = {i: bits[i] + 1 + i % 3 for i in bits}
    nbytes = {i: 50.0 for i in bits}
    found = compare_values(bits, more, nbytes, higher_is_better=False)
    assert (
        found.verdict == "worse" and found.difference == pytest.approx(2 / 50) and found.fell == 30
    )
    assert found.low > 0 and found.smallest == pytest.approx((found.high - found.low) / 2)
    assert compare_values(bits, more, nbytes).verdict == "better"
    noise = {i: bits[i] + (-1) ** i for i in bits}
    assert compare_values(bits, noise, nbytes).verdict == "not decidable with n = 30"
    few = compare_values({i: bits[i] for i in range(5)}, {i: more[i] for i in range(5)})
    assert few.low is None and few.verdict == "not decidable with n = 5"


def test_nan_raises():
    with pytest.raises(BadRequest, match="NaN"):
        compare_values({"a": 1.0}, {"a": math.nan})


def test_a_score_is_at_the_floor_if_no_fall_could_be_shown():
    assert at_floor(5, 164) and not at_floor(6, 164)
    assert at_floor(80, 281, 0.25) and not at_floor(90, 281, 0.25)
    assert at_floor(10, 10, 0.9)
