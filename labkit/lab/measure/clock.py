"""Measure time: synchronized, warmed up, interleaved, with intervals.

The time of a call runs from one synchronization to the next, because a call on a GPU
returns before its work is done. Warm-up calls come first and do not count. Functions
that are compared run interleaved in one loop, and each round starts with another
function. If the machine becomes slower, it does so for all of them, and their ratio is
computed round by round. Intervals are order statistics, which do not assume a
distribution; see `median_interval`. Limitation: fewer than 6 repeats cannot reach 95 %.
The interval is then the whole range, and its confidence is lower.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import comb

from labkit.errors import BadRequest, whole_number
from labkit.kernels.device import synchronize

now = time.perf_counter  # a test can replace it


@dataclass(frozen=True)
class Timing:
    """The seconds of each repeat, in order, with their median and its 95 % interval."""

    times_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def low_s(self) -> float:
        return median_interval(self.times_s)[0]

    @property
    def high_s(self) -> float:
        return median_interval(self.times_s)[1]


@dataclass(frozen=True)
class Ratio:
    """How many times faster the first function was: median over rounds, with interval."""

    value: float
    low: float
    high: float
    confidence: float  # of the interval; below 0.95 the interval is the whole range

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def time_once(fn: Callable[[], object], device="cpu") -> float:
    """Return the seconds of one call; the device is idle before and after."""
    synchronize(device)
    start = now()
    fn()
    synchronize(device)
    return now() - start


def measure(fn: Callable[[], object], *, repeats: int = 5, warmup: int = 1, device="cpu") -> Timing:
    """Time one function `repeats` times, after `warmup` calls."""
    return interleave({"": fn}, repeats=repeats, warmup=warmup, device=device)[""]


def interleave(
    arms: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 5,
    warmup: int = 1,
    device="cpu",
    on_round: Callable[[int], object] | None = None,
) -> dict[str, Timing]:
    """Time several functions `repeats` times; each round starts with another function.

    `on_round` is called after each round with the number of rounds so far.
    """
    whole_number(repeats, "repeats", 1)
    for fn in arms.values():
        for _ in range(warmup):
            time_once(fn, device)
    names = list(arms)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(time_once(arms[name], device))
        if on_round is not None:
            on_round(turn + 1)
    return {name: Timing(tuple(seconds)) for name, seconds in times.items()}


def ratio(a: Timing, b: Timing) -> Ratio:
    """Return how many times faster `a` is than `b`, from their ratio in each round."""
    if len(a.times_s) != len(b.times_s):
        raise BadRequest(
            f"The timings have {len(a.times_s)} and {len(b.times_s)} repeats; time both functions "
            "in one call of interleave()."
        )
    return median_ratio(y / x for x, y in zip(a.times_s, b.times_s))


def median_ratio(values: Iterable[float]) -> Ratio:
    """Return the median of ratios, one per round, with its interval."""
    values = list(values)
    low, high, confidence = median_interval(values)
    return Ratio(statistics.median(values), low, high, confidence)


def median_interval(
    values: Iterable[float], confidence: float = 0.95
) -> tuple[float, float, float]:
    """Return an interval for the median from order statistics: (low, high, coverage).

    Of n sorted values, x[k] .. x[n-1-k] contains the median with probability 1 - 2 *
    P(Binomial(n, 1/2) <= k) (David & Nagaraja, Order Statistics, 7.1). The result is
    the narrowest interval that reaches `confidence`, or else the whole range.
    """
    ordered = sorted(values)
    n = len(ordered)
    if n == 0:
        raise BadRequest("There are no values, so there is no median; measure at least once.")
    below = accumulate(comb(n, i) for i in range((n + 1) // 2))
    coverages = [1 - 2 * count / 2**n for count in below]  # of the intervals, from wide to narrow
    k = max(sum(coverage >= confidence for coverage in coverages) - 1, 0)
    return ordered[k], ordered[n - 1 - k], coverages[k]
