"""Do drawn tokens follow a distribution? Pearson's chi-square, for showing that a rule is right, or that it is not.

    X = sum over cells of (count - expected)^2 / expected         cells that expect less than 5 are taken together
    p = P(chi-square with cells - 1 degrees of freedom >= X)      by Wilson and Hilferty's cube root (1931), good to 1e-3

A right rule is rejected at 1 % once in a hundred seeds; a wrong one must be rejected for any n that is large enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import erfc, sqrt

FEWEST = 5.0  # expected counts that a cell of its own needs


@dataclass(frozen=True)
class Fit:
    """`p` is 0 where something was drawn that cannot be."""

    statistic: float
    freedom: int
    p: float

    def __str__(self) -> str:
        return f"chi-square {self.statistic:.1f} with {self.freedom} degrees of freedom, p = {self.p:.2g}"


def goodness_of_fit(counts: Sequence[float], distribution: Sequence[float]) -> Fit:
    """How well `counts` fit `distribution`, cell by cell."""
    counts, distribution = list(map(float, counts)), list(map(float, distribution))
    n, total = sum(counts), sum(distribution)
    expected = [n * share / total for share in distribution]
    if any(count and not wanted for count, wanted in zip(counts, expected, strict=True)):
        return Fit(float("inf"), len(counts) - 1, 0.0)
    cells = [(count, wanted) for count, wanted in zip(counts, expected) if wanted >= FEWEST]
    rest = [(count, wanted) for count, wanted in zip(counts, expected) if 0 < wanted < FEWEST]
    if rest:
        cells.append(tuple(map(sum, zip(*rest))))
    statistic, k = sum((count - wanted) ** 2 / wanted for count, wanted in cells), len(cells) - 1
    if k < 1:
        return Fit(statistic, 0, 1.0)
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / sqrt(2 / (9 * k))
    return Fit(statistic, k, erfc(z / sqrt(2)) / 2)
