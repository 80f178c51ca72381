"""Goodness of fit against published numbers, and both ways."""

import pytest

from labkit_course.experiments.goodness import goodness_of_fit


def test_published_points_of_chi_square():
    """99 % points: 11.345, 23.209 and 50.892 for 3, 10 and 30 degrees of freedom."""
    for freedom, point in ((3, 11.345), (10, 23.209), (30, 50.892)):
        cells = freedom + 1
        off = (point * 1000 / 2) ** 0.5  # two cells off by as much give this statistic
        fit = goodness_of_fit([1000 + off, 1000 - off, *[1000] * (cells - 2)], [1 / cells] * cells)
        assert fit.freedom == freedom and fit.statistic == pytest.approx(point)
        assert fit.p == pytest.approx(0.01, abs=1e-3)


def test_small_cells_are_taken_together():
    fit = goodness_of_fit([900, 98, 1, 1], [0.9, 0.098, 0.001, 0.001])
    assert fit.freedom == 2 and fit.statistic == 0 and fit.p > 0.9


def test_what_cannot_be_drawn_is_a_misfit():
    assert goodness_of_fit([10, 1], [1.0, 0.0]).p == 0.0
    assert goodness_of_fit([10], [1.0]).p == 1.0
