"""Rows and comparisons: intervals, verdicts, errors and flipped items."""

from __future__ import annotations

import pytest

from labkit.errors import BadRequest
from labkit.lab.evals.report import compare, flipped, results
from labkit.lab.evals.statistics import bootstrap, wilson
from labkit.lab.evals.task import NOT_JUDGED, ItemScore, Metric

METRICS = (
    Metric("margin", "nats"),
    Metric("right", share=True, chance=0.25),
    Metric("bits", higher_is_better=False),
)


def scores(count=40, right=30, shift=0.0, bits=8.0):
    return [
        ItemScore(
            f"i{i}",
            "a" if i < count // 2 else "b",
            {
                "right": (float(i < right), 1.0),
                "margin": (i % 7 - 3 + shift * (1 + i % 3), 1.0),
                "bits": (bits + i % 5, 4.0),
            },
            details={"chosen": i},
        )
        for i in range(count)
    ]


def test_rows_have_intervals_chance_and_errors():
    found = [
        *scores(),
        ItemScore("lost", "b", error="NaN"),
        ItemScore("cut", "b", {"right": (1.0, 1.0)}, details={"trimmed": 2}),
    ]
    rows = {(row["slice"], row["metric"]): row for row in results(METRICS, "toy", found)}
    assert {slice for slice, _ in rows} == {"a", "b", "all"}
    row, expected = rows["all", "right"], wilson(31, 41)
    assert (row["value"], row["low"], row["high"], row["n"]) == (
        31 / 41,
        expected.low,
        expected.high,
        41,
    )
    assert (row["chance"], row["errors"], row["trimmed"]) == (0.25, 1, 1)
    assert rows["a", "right"]["errors"] == 0
    bits = bootstrap([8 + i % 5 for i in range(40)], [4] * 40)
    assert rows["all", "bits"]["value"] == bits.value == pytest.approx(2.5)
    assert (rows["all", "bits"]["low"], rows["all", "bits"]["high"]) == (bits.low, bits.high)
    assert {"task", "slice", "metric", "value", "low", "high", "n"} <= set(row) and row[
        "task"
    ] == "toy"


def test_two_runs_are_compared_item_by_item_with_a_verdict():
    rows = {
        (row["slice"], row["metric"]): row
        for row in compare(METRICS, "toy", scores(), scores(right=15, shift=-0.5, bits=9.0))
    }
    assert rows["all", "right"]["verdict"] == "worse" and (
        rows["all", "right"]["fell"],
        rows["all", "right"]["rose"],
    ) == (15, 0)
    assert rows["all", "margin"]["verdict"] == "worse" and rows["all", "margin"]["high"] < 0
    assert rows["all", "bits"]["verdict"] == "worse" and rows["all", "bits"][
        "difference"
    ] == pytest.approx(0.25)
    same = compare(METRICS, "toy", scores(), scores(right=29))
    assert {row["verdict"] for row in same if row["slice"] == "all"} == {
        "not decidable with n = 40"
    }
    floor = compare(METRICS, "toy", scores(right=10), scores(right=2))
    assert (
        next(r for r in floor if (r["slice"], r["metric"]) == ("all", "right"))["verdict"]
        == "at the floor"
    )
    better = compare(METRICS, "toy", scores(right=15, bits=9.0), scores())
    assert {r["metric"]: r["verdict"] for r in better if r["slice"] == "all"} == {
        "right": "better",
        "bits": "better",
        "margin": "not decidable with n = 40",
    }


def test_flipped_items_have_their_details():
    found = flipped(METRICS, scores(), scores(right=28))
    assert [(one["item"], one["was"], one["is"]) for one in found] == [
        ("i28", True, False),
        ("i29", True, False),
    ]
    assert (
        found[0]["metric"] == "right" and found[0]["before"] == {"chosen": 28} == found[0]["after"]
    )


def test_an_item_without_a_score_in_one_run_is_left_out_of_both_and_counted():
    after = [ItemScore(s.item, s.slice, error="NaN") if s.item == "i3" else s for s in scores()]
    row = next(
        r
        for r in compare(METRICS, "toy", scores(), after)
        if (r["slice"], r["metric"]) == ("all", "right")
    )
    assert (row["n"], row["errors"]) == (39, 1) and row["difference"] == 0
    assert flipped(METRICS, scores(), after) == []
    after = [
        ItemScore(s.item, s.slice, {**s.metrics, "right": NOT_JUDGED}) if s.item == "i3" else s
        for s in scores()
    ]
    rows = {
        row["metric"]: row
        for row in compare(METRICS, "toy", scores(), after)
        if row["slice"] == "all"
    }
    assert (rows["right"]["n"], rows["right"]["errors"]) == (39, 1) and rows["margin"]["n"] == 40
    rows = {row["metric"]: row for row in results(METRICS, "toy", after) if row["slice"] == "all"}
    assert (rows["right"]["n"], rows["right"]["errors"], rows["margin"]["errors"]) == (39, 1, 0)


def test_other_items_raise_and_other_denominators_are_left_out():
    with pytest.raises(BadRequest, match="differ in 5 items"):
        compare(METRICS, "toy", scores(), scores(count=45))
    other = [ItemScore(s.item, s.slice, {**s.metrics, "bits": (1.0, 5.0)}) for s in scores()]
    assert "bits" not in {row["metric"] for row in compare(METRICS, "toy", scores(), other)}
