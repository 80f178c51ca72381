"""The checks of notebook 04: right answers pass, and each mistake is named. And its plots refuse what cannot be read."""

from math import comb

import pytest

from labkit.errors import BadRequest
from labkit_course.checks import what_it_costs as ex
from labkit_course.show.figures import canvas
from labkit_course.show.verdict_plots import difference_plot, sample_plot


def p_value(fell, rose):
    tail = sum(comb(fell + rose, k) for k in range(min(fell, rose) + 1)) / 2 ** (fell + rose)
    return min(1.0, 2 * tail)


def test_right_answers_pass():
    assert ex.check_smallest(6 / 164 * 100) and ex.check_smallest(3.66)
    assert ex.check_flips(p_value)
    assert ex.check_can_fall({"structured, prefers"}) and ex.check_can_fall(["structured, prefers"])


@pytest.mark.parametrize(
    ("check", "answer", "named"),
    [
        (ex.check_smallest, 5 / 164 * 100, "sixteen"),
        (ex.check_smallest, 0.61, "One flip"),
        (ex.check_smallest, 2.0, "the claim"),
        (ex.check_smallest, 0.0366, "Give points"),
        (ex.check_smallest, 10.0, "2 / 2**n"),
        (ex.check_flips, lambda fell, rose: p_value(fell, rose) / 2, "one side"),
        (
            ex.check_flips,
            lambda f, r: 2 * sum(comb(f + r, k) for k in range(min(f, r) + 1)) / 2 ** (f + r),
            "at most 1",
        ),
        (
            ex.check_flips,
            lambda fell, rose: comb(fell + rose, min(fell, rose)) / 2 ** (fell + rose),
            "probability of this split",
        ),
        (ex.check_flips, lambda fell, rose: 0.5, "twice the sum"),
        (ex.check_can_fall, "structured, prefers", "a set"),
        (ex.check_can_fall, {"nonsense"}, "a set"),
        (ex.check_can_fall, set(), "structured, prefers can"),
        (ex.check_can_fall, {"structured, prefers", "mmlu, text"}, "includes chance"),
        (ex.check_can_fall, {"structured, prefers", "humaneval"}, "only 4 items"),
    ],
)
def test_a_mistake_is_named(check, answer, named):
    outcome = check(answer)
    assert not outcome and named in outcome.message


def test_dots_are_filled_where_the_interval_leaves_zero():
    _, ax = canvas()
    difference_plot(
        ax,
        ["a", "b"],
        {"one": [(1.0, 0.5, 1.5), (0.2, -0.1, 0.5)], "two": [None, (-1.0, -2.0, -0.5)]},
        xlabel="x",
    )
    dots = [line for line in ax.lines if line.get_marker() not in ("None", "")]
    assert [line.get_markerfacecolor() == line.get_color() for line in dots] == [True, False, True]
    with pytest.raises(BadRequest, match="one dot or None for each"):
        difference_plot(ax, ["a", "b"], {"one": [None]}, xlabel="x")
    with pytest.raises(BadRequest, match="at most 4"):
        difference_plot(ax, [], {str(i): [] for i in range(5)}, xlabel="x")


def test_the_claims_stand_as_lines_over_what_can_be_shown():
    _, ax = canvas()
    sample_plot(ax, [10, 100], [0.6, 0.06], {"set": (100, 0.06)}, claims={"2 points": 2})
    assert list(ax.lines[0].get_ydata()) == [60, 6] and [t.get_text() for t in ax.texts] == [
        "2 points"
    ]
