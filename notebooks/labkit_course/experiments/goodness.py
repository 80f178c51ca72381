"""Test with Pearson's chi-square if sampled tokens follow a distribution.

Cells that expect fewer than 5 draws are merged into one. A right rule is rejected at 1 % once in a
hundred seeds; a wrong one must be rejected if enough tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import chisquare

FEWEST = 5.0  # expected draws that a cell of its own needs


@dataclass(frozen=True)
class Fit:
    """The result of a test. `p` is 0 if a token of probability 0 was sampled."""

    statistic: float
    freedom: int
    p: float

    def __str__(self) -> str:
        return (
            f"chi-square {self.statistic:.1f} with {self.freedom} degrees of freedom, "
            f"p = {self.p:.2g}"
        )


def goodness_of_fit(counts: Sequence[float], distribution: Sequence[float]) -> Fit:
    """Test if `counts` fit `distribution`; cells that expect fewer than 5 are merged."""
    drawn, share = np.asarray(counts, float), np.asarray(distribution, float)
    expected = drawn.sum() * share / share.sum()
    if drawn[expected == 0].any():
        return Fit(float("inf"), len(drawn) - 1, 0.0)
    large = expected >= FEWEST
    small = (expected > 0) & ~large
    cells = [x[large] for x in (drawn, expected)]
    if small.any():
        merged = (drawn[small].sum(), expected[small].sum())
        cells = [np.append(x, rest) for x, rest in zip(cells, merged)]
    if len(cells[0]) < 2:
        return Fit(0.0, 0, 1.0)
    statistic, p = chisquare(*cells)
    return Fit(float(statistic), len(cells[0]) - 1, float(p))
