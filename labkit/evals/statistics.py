"""What a sample can decide: intervals, paired tests, and one verdict word a comparison.

    one score           k of n right: Wilson's interval (1927), which stays inside 0..1 and is honest at 0 and at n
    right or wrong      two runs on the same items: only those that flipped speak. Exact McNemar: under "no change" each
                        flip is a fair coin, p = P(a split at least as uneven among `fell + rose` coins)
    values              (margins, bits) paired bootstrap: items are drawn with replacement, both runs together
    smallest difference what these n items, with as many flips as were seen, could have called worse; never under 6 / n,
                        because five coins all alike happen by chance once in sixteen times

Verdicts: "worse", "better", "not decidable with n = ...", and "at the floor" where the reference is so near chance (or
zero) that it cannot fall visibly. An item that could not be scored (None) in either run is left out of both and counted.
Each row is judged at 95 %: of twenty rows without any change, one will say worse or better. Cost: milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from labkit.errors import BadRequest

ALPHA, Z = 0.05, 1.959963984540054  # 95 %, two-sided, everywhere
FEWEST = 6  # flips (or items) all in one direction before a fair coin is rejected: 2 / 2**6 < 0.05 < 2 / 2**5
DRAWS = 4000


@dataclass(frozen=True)
class Interval:
    value: float
    low: float | None  # None: too few items for an interval
    high: float | None
    n: int


@dataclass(frozen=True)
class Comparison:
    """`difference` is changed - reference, `low` to `high` its 95 % interval; `n` items were scored in both runs."""

    reference: float
    changed: float
    difference: float
    low: float | None
    high: float | None
    n: int
    fell: int  # items that lost by the change
    rose: int
    ties: int
    errors: int  # items that one of the runs could not score: in no other number here
    smallest: float | None  # the smallest difference that this sample could show
    p: float | None  # of exact McNemar; None for values
    verdict: str

    def as_dict(self) -> dict:
        return asdict(self)


def wilson(right: int, n: int) -> Interval:
    """A proportion and its 95 % interval; `n` of 0 is refused."""
    if not 0 <= right <= n or n < 1:
        raise BadRequest(f"{right} right of {n} is no proportion; count at least one item and no more right than items.")
    p, spread = right / n, Z * Z / n
    middle = (p + spread / 2) / (1 + spread)
    half = Z * math.sqrt(p * (1 - p) / n + spread / (4 * n)) / (1 + spread)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return Interval(p, 0.0 if right == 0 else low, 1.0 if right == n else high, n)


def mcnemar(fell: int, rose: int) -> float:
    """Exact two-sided p of a split of flips at least as uneven as this one; 1 where nothing flipped."""
    return min(1.0, 2 * _at_most(min(fell, rose), fell + rose, 0.5))


def smallest_difference(n: int, flips: int = 0) -> float | None:
    """The least difference of two proportions that exact McNemar would call one, were `flips` items to flip; None: none
    of n items could. With few flips it is all of them in one direction, 6 / n."""
    flips = max(flips, FEWEST)
    if n < FEWEST:
        return None
    fewer = next(k for k in range(flips // 2, -1, -1) if mcnemar(k, flips - k) < ALPHA)
    return (flips - 2 * fewer) / n


def at_floor(right: int, n: int, chance: float = 0.0) -> bool:
    """Whether a fall from here to `chance` could not be shown: its interval holds chance, or fewer than 6 items lie above."""
    return n == 0 or wilson(right, n).low <= chance or right - chance * n < FEWEST


def bootstrap(above: Sequence[float], below: Sequence[float] | None = None, seed: int = 0, draws: int = DRAWS) -> Interval:
    """sum(above) / sum(below) over items, or the mean of `above`; 95 % percentile interval, None under 6 items."""
    import numpy as np

    a = np.asarray(above, dtype=np.float64)
    b = np.ones_like(a) if below is None else np.asarray(below, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise BadRequest(f"{a.shape} values over {b.shape} weights cannot be averaged; give one of each an item.")
    if not (np.isfinite(a).all() and np.isfinite(b).all() and b.sum() > 0):
        raise BadRequest("A value is NaN or infinite, or the weights sum to 0; give None for an item without a score.")
    value, n = float(a.sum() / b.sum()), len(a)
    if n < FEWEST:
        return Interval(value, None, None, n)
    random, found = np.random.default_rng(seed), []
    block = max(1, 2_000_000 // n)  # draws at once: 16 MB of indices
    for start in range(0, draws, block):
        pick = random.integers(n, size=(min(block, draws - start), n))
        found.append(a[pick].sum(1) / b[pick].sum(1))
    low, high = np.quantile(np.concatenate(found), [ALPHA / 2, 1 - ALPHA / 2])
    return Interval(value, float(low), float(high), n)


def compare_scores(reference: Mapping[str, bool | None], changed: Mapping[str, bool | None],
                   chance: float = 0.0) -> Comparison:  # fmt: skip
    """Two runs over the same items, right or wrong each (None: could not be scored). `chance`: a guesser's score."""
    ids, errors = _pairs(reference, changed)
    before, after = [bool(reference[i]) for i in ids], [bool(changed[i]) for i in ids]
    fell = sum(x and not y for x, y in zip(before, after))
    rose = sum(y and not x for x, y in zip(before, after))
    n, p = len(ids), mcnemar(fell, rose)
    low, high = _difference_interval(fell, rose, n)
    decided = None if p >= ALPHA else "worse" if fell > rose else "better"
    if at_floor(sum(before), n, chance) and (decided != "better" or at_floor(sum(after), n, chance)):
        decided = "at the floor"  # a score at the floor cannot fall, and from chance to chance is no rise
    return Comparison(
        sum(before) / n, sum(after) / n, (rose - fell) / n, low, high, n, fell, rose, n - fell - rose, errors,
        smallest_difference(n, fell + rose), p, decided or _undecided(n),
    )  # fmt: skip


def compare_values(reference: Mapping[str, float | None], changed: Mapping[str, float | None],
                   weights: Mapping[str, float] | None = None, higher_is_better: bool = True,
                   seed: int = 0) -> Comparison:  # fmt: skip
    """Two runs' sums over the same items (bits, margins) over `weights` (bytes, tokens; 1 an item where None)."""
    ids, errors = _pairs(reference, changed)
    below = [1.0 if weights is None else float(weights[i]) for i in ids]
    before, after = [float(reference[i]) for i in ids], [float(changed[i]) for i in ids]
    gains = [y - x if higher_is_better else x - y for x, y in zip(before, after)]
    step = bootstrap([y - x for x, y in zip(before, after)], below, seed)
    fell, rose, n, total = sum(g < 0 for g in gains), sum(g > 0 for g in gains), len(ids), sum(below)
    if step.low is None or step.low <= 0 <= step.high:
        verdict = _undecided(n)
    else:
        verdict = "better" if (step.value > 0) == higher_is_better else "worse"
    smallest = None if step.low is None else (step.high - step.low) / 2
    return Comparison(
        sum(before) / total, sum(after) / total, step.value, step.low, step.high, n, fell, rose, n - fell - rose,
        errors, smallest, None, verdict,
    )  # fmt: skip


def _undecided(n: int) -> str:
    return f"not decidable with n = {n}"


def _pairs(reference: Mapping, changed: Mapping) -> tuple[list, int]:
    """Ids scored in both runs, and how many were not."""
    if set(reference) != set(changed):
        odd = sorted(map(str, set(reference) ^ set(changed)))
        raise BadRequest(f"The two runs differ in {len(odd)} items (such as {odd[0]}); compare runs over the same items.")
    ids = [i for i in reference if reference[i] is not None and changed[i] is not None]
    if not ids:
        raise BadRequest(f"No item of {len(reference)} was scored in both runs; there is nothing to compare.")
    return ids, len(reference) - len(ids)


def _at_most(k: int, n: int, p: float) -> float:
    """P(X <= k), X binomial(n, p)."""
    if p <= 0 or k >= n:
        return 1.0
    if p >= 1 or k < 0:
        return 0.0
    choose = lambda i: math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)  # noqa: E731
    return math.fsum(math.exp(choose(i) + i * math.log(p) + (n - i) * math.log1p(-p)) for i in range(k + 1))


def _difference_interval(fell: int, rose: int, n: int) -> tuple[float, float]:
    """(share that flips) x (2 x share of rises among flips - 1): Clopper-Pearson's interval of the second, which excludes 0
    exactly where McNemar's p is under 5 %, times the end of Wilson's interval of the first that lies further out where
    the sign is open, further in where it is settled."""
    flips = fell + rose
    share = wilson(flips, n)

    def end(tail, target: float) -> float:
        low, high = 0.0, 1.0  # `tail` grows with p
        for _ in range(60):
            p = (low + high) / 2
            low, high = (p, high) if tail(p) < target else (low, p)
        return low + high - 1  # twice the middle, less one

    bottom = -1.0 if rose == 0 else end(lambda p: 1 - _at_most(rose - 1, flips, p), ALPHA / 2)
    top = 1.0 if rose == flips else end(lambda p: 1 - _at_most(rose, flips, p), 1 - ALPHA / 2)
    return bottom * (share.low if bottom > 0 else share.high), top * (share.high if top > 0 else share.low)
