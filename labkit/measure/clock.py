"""Time, so that two numbers may be compared: synchronised, warmed up, interleaved, with their spread.

A call is timed from one synchronisation to the next; a GPU returns before it has worked. Warm-up calls
are made and thrown away. Arms that are compared run in turns inside one loop, each round starting with
another arm, so that a machine that slows down slows all of them; their ratio is taken round by round.
The interval is made of order statistics (no distribution is assumed): see `median_interval`.
When it loses: fewer than 6 repeats cannot give 95 %; then the interval is the whole range and says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import comb

from labkit.errors import BadRequest

now = time.perf_counter            # looked up at each call, so that a test can put a fake clock here


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat in order, their median, and its interval."""

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
    """How many times faster the first arm was: the median over rounds, and its interval."""

    value: float
    low: float
    high: float
    confidence: float               # what the interval really covers; below 0.95 it is the whole range

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def synchronize(device="cpu") -> None:
    """Wait until `device` has done what it was given; nothing to wait for on a CPU."""
    kind = str(device).split(":")[0]
    if kind == "cpu":
        return
    import torch
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()
    else:
        raise BadRequest(f"device {str(device)!r} cannot be timed; use cpu, cuda or mps.")


def time_once(fn: Callable[[], object], device="cpu") -> float:
    """Seconds of one call, with the device idle before the first and before the second look at the clock."""
    synchronize(device)
    start = now()
    fn()
    synchronize(device)
    return now() - start


def measure(fn: Callable[[], object], *, repeats: int = 5, warmup: int = 1, device="cpu") -> Timing:
    return interleave({"": fn}, repeats=repeats, warmup=warmup, device=device)[""]


def interleave(arms: Mapping[str, Callable[[], object]], *, repeats: int = 5, warmup: int = 1, device="cpu",
               on_round: Callable[[int], None] | None = None) -> dict[str, Timing]:
    """Time every arm `repeats` times, in turns; round r begins with arm r, so that no arm always goes first."""
    if repeats < 1 or warmup < 0:
        raise BadRequest(f"{repeats} repeats after {warmup} warm-up calls measure nothing; repeats must be at "
                         "least 1 and warmup at least 0.")
    names = list(arms)
    for name in names:
        for _ in range(warmup):
            time_once(arms[name], device)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(time_once(arms[name], device))
        if on_round is not None:
            on_round(turn + 1)
    return {name: Timing(tuple(seconds)) for name, seconds in times.items()}


def ratio(a: Timing, b: Timing) -> Ratio:
    """How many times faster `a` is than `b`: b's seconds over a's, paired by round. Below 1 is a slowdown."""
    if len(a.times_s) != len(b.times_s):
        raise BadRequest(f"{len(a.times_s)} and {len(b.times_s)} repeats cannot be paired; time both arms in one "
                         "interleave().")
    return median_ratio([y / x for x, y in zip(a.times_s, b.times_s, strict=True)])


def median_ratio(values) -> Ratio:
    low, high, confidence = median_interval(values)
    return Ratio(statistics.median(values), low, high, confidence)


def median_interval(values, confidence: float = 0.95) -> tuple[float, float, float]:
    """The narrowest pair of order statistics that holds the median with `confidence`: (low, high, coverage).

    x[k] .. x[n-1-k] of n sorted values holds it with probability 1 - 2 * P(Binomial(n, 1/2) <= k)
    (David & Nagaraja, Order Statistics, 7.1). Where even the whole range is not enough, it is the whole range.
    """
    ordered = sorted(values)
    n = len(ordered)
    if n == 0:
        raise BadRequest("no values were given, so there is no median; measure at least once.")
    k, below, coverage = 0, 0, max(0.0, 1 - 2 * 0.5**n)
    for candidate in range((n + 1) // 2):
        below += comb(n, candidate)
        inside = 1 - 2 * below / 2**n
        if candidate and inside < confidence:
            break
        k, coverage = candidate, max(0.0, inside)
    return ordered[k], ordered[n - 1 - k], coverage
