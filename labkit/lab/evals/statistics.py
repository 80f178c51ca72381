"""Intervals, paired tests, and one verdict per comparison.

    one score            Wilson's interval (1927) of k right out of n; it stays inside 0..1
    right or wrong       two runs over the same items: McNemar's exact test. Only items that
                         flipped count. Without a change, each flip is a fair coin
    values               margins, bits: a paired bootstrap. Items are drawn with replacement, for
                         both runs together
    smallest difference  the smallest difference that n items with this many flips can show. It
                         is at least 6 / n, because five fair coins fall alike once in 16 times

Verdicts are "worse", "better", "not decidable with n = ..." and "at the floor". The last one means
that the reference is so near chance (or zero) that it cannot fall visibly. An item that one of the
runs could not score is left out of both runs and counted as an error. Each row is judged at 95 %:
without any change, about one row in twenty says worse or better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labkit.errors import BadRequest

ALPHA = 0.05  # 95 %, two-sided, everywhere
FEWEST = 6  # so many flips in one direction reject a fair coin: 2 / 2**6 < 0.05 < 2 / 2**5
DRAWS = 4000


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval; `low` and `high` are None if there are too few items."""

    value: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Comparison:
    """Two runs over the same items.

    difference: changed - reference, with the 95 % interval `low` to `high`.
    n: the number of items that both runs scored. `fell` of them became worse, `rose` better,
        and `ties` did not change.
    errors: the number of other items. They count nowhere else.
    smallest: the smallest difference that the sample could show.
    p: of McNemar's exact test; None for values.
    """

    reference: float
    changed: float
    difference: float
    low: float | None
    high: float | None
    n: int
    fell: int
    rose: int
    ties: int
    errors: int
    smallest: float | None
    p: float | None
    verdict: str


def wilson(right: int, n: int) -> Interval:
    """Return the proportion right / n with Wilson's interval.

    Raises BadRequest unless 0 <= right <= n and n > 0.
    """
    if not 0 <= right <= n or n < 1:
        raise BadRequest(f"{right} of {n} is not a proportion; give 0 <= right <= n and n > 0.")
    from scipy.stats import binomtest

    bounds = binomtest(right, n).proportion_ci(1 - ALPHA, "wilson")
    return Interval(right / n, float(bounds.low), float(bounds.high), n)


def mcnemar(fell: int, rose: int) -> float:
    """Return the two-sided p of McNemar's exact test; 1 if nothing flipped."""
    from scipy.stats import binomtest

    return float(binomtest(fell, fell + rose).pvalue) if fell + rose else 1.0


def smallest_difference(n: int, flips: int = 0) -> float | None:
    """Return the smallest difference of two proportions that McNemar's exact test would accept.

    `flips` items flip. If fewer than 6 do, the result is 6 / n, that is 6 flips in one
    direction. The result is None if n items are too few to show any difference.
    """
    if n < FEWEST:
        return None
    from scipy.stats import binom

    flips = max(flips, FEWEST)
    fewer = int(binom.ppf(ALPHA / 2, flips, 0.5)) - 1  # the largest k with P(X <= k) < 2.5 %
    return (flips - 2 * fewer) / n


def at_floor(right: int, n: int, chance: float = 0.0) -> bool:
    """Return True if a fall to `chance` could not be shown.

    This is the case if the interval contains chance, or if fewer than 6 right items exceed
    the number that chance would give.
    """
    return n == 0 or wilson(right, n).low <= chance or right - chance * n < FEWEST


def bootstrap(
    above: Sequence[float], below: Sequence[float] | None = None, seed: int = 0, draws: int = DRAWS
) -> Interval:
    """Return sum(above) / sum(below) over items, or the mean of `above`, with its interval.

    The interval is the 95 % percentile interval. There is none for fewer than 6 items.
    Raises BadRequest if a value is not finite or the weights do not sum to more than 0.
    """
    import numpy as np

    a = np.asarray(above, dtype=np.float64)
    b = np.ones_like(a) if below is None else np.asarray(below, dtype=np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all() and b.sum() > 0):
        raise BadRequest(
            "A value is NaN or infinite, or the weights sum to 0; leave that item out."
        )
    value, n = float(a.sum() / b.sum()), len(a)
    if n < FEWEST:
        return Interval(value, None, None, n)
    random, ratios = np.random.default_rng(seed), []
    block = max(1, 2_000_000 // n)  # draws at once: 16 MB of indices
    for start in range(0, draws, block):
        pick = random.integers(n, size=(min(block, draws - start), n))
        ratios.append(a[pick].sum(1) / b[pick].sum(1))
    low, high = np.quantile(np.concatenate(ratios), [ALPHA / 2, 1 - ALPHA / 2])
    return Interval(value, float(low), float(high), n)


def compare_scores(
    reference: Mapping[str, bool | None], changed: Mapping[str, bool | None], chance: float = 0.0
) -> Comparison:
    """Compare two runs of items that are right, wrong, or None (could not be scored).

    `chance` is the score of a random choice.
    """
    ids, errors = _scored_ids(reference, changed)
    before, after = ([bool(run[i]) for i in ids] for run in (reference, changed))
    fell = sum(x and not y for x, y in zip(before, after))
    rose = sum(y and not x for x, y in zip(before, after))
    n, p = len(ids), mcnemar(fell, rose)
    verdict = _undecided(n) if p >= ALPHA else "worse" if fell > rose else "better"
    if at_floor(sum(before), n, chance) and (
        verdict != "better" or at_floor(sum(after), n, chance)
    ):
        verdict = "at the floor"  # it cannot fall, and a rise must leave the floor
    low, high = _difference_interval(fell, rose, n)
    values = (sum(before) / n, sum(after) / n, (rose - fell) / n, low, high)
    smallest = smallest_difference(n, fell + rose)
    return Comparison(*values, n, fell, rose, n - fell - rose, errors, smallest, p, verdict)


def compare_values(
    reference: Mapping, changed: Mapping, weights=None, higher_is_better=True, seed: int = 0
) -> Comparison:
    """Compare two runs of values, such as bits or margins; None means not scored.

    The score of a run is the sum of its values over the sum of `weights`, such as bytes or
    tokens. Without weights, each item weighs 1.
    """
    ids, errors = _scored_ids(reference, changed)
    below = [1.0 if weights is None else float(weights[i]) for i in ids]
    before, after = ([float(run[i]) for i in ids] for run in (reference, changed))
    steps = [y - x for x, y in zip(before, after)]
    step, n, total = bootstrap(steps, below, seed), len(ids), sum(below)
    fell, rose = sum(d < 0 for d in steps), sum(d > 0 for d in steps)
    if not higher_is_better:
        fell, rose = rose, fell
    verdict, smallest = _undecided(n), None
    if step.low is not None:
        smallest = (step.high - step.low) / 2
        if step.low > 0 or step.high < 0:
            verdict = "better" if (step.value > 0) == higher_is_better else "worse"
    values = (sum(before) / total, sum(after) / total, step.value, step.low, step.high)
    return Comparison(*values, n, fell, rose, n - fell - rose, errors, smallest, None, verdict)


def _undecided(n: int) -> str:
    return f"not decidable with n = {n}"


def _scored_ids(reference: Mapping, changed: Mapping) -> tuple[list, int]:
    """Return the ids that both runs scored, and the number of other ids."""
    ids = [i for i in reference if reference[i] is not None and changed[i] is not None]
    if not ids:
        raise BadRequest(f"No item of {len(reference)} was scored in both runs; compare others.")
    return ids, len(reference) - len(ids)


def _difference_interval(fell: int, rose: int, n: int) -> tuple[float, float]:
    """Return an interval that excludes 0 exactly if McNemar's p is below 5 %.

    A difference is (share of flips) x (2 x share of rises among the flips - 1). The second
    factor has Clopper and Pearson's interval. Each of its ends is multiplied by one end of
    Wilson's interval of the first factor: the end that gives the smaller number for `low`
    and the larger number for `high`.
    """
    from scipy.stats import binomtest

    share, bottom, top = wilson(fell + rose, n), -1.0, 1.0
    if fell + rose:
        rises = binomtest(rose, fell + rose).proportion_ci(1 - ALPHA, "exact")
        bottom, top = 2 * float(rises.low) - 1, 2 * float(rises.high) - 1
    low = min(bottom * share.low, bottom * share.high)
    return low, max(top * share.low, top * share.high)
