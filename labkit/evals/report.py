"""Scores as rows: one a task, slice and metric, with an interval; and two runs beside each other, item by item.

    results(task, scores)               value, low, high, n; chance beside it; items that could not be scored are counted
    compare(task, before, after)        difference, its interval, and a verdict word (see `statistics`)
    flipped(task, before, after)        the items that are right in one run and wrong in the other, to be read

Every task has a slice `all`. A difference never stands without its interval: few items that all changed a little may say
more than a share that moved by ten points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.errors import BadRequest
from labkit.evals.statistics import bootstrap, compare_scores, compare_values, wilson
from labkit.evals.task import ItemScore, Metric


def slices(scores: Sequence[ItemScore]) -> list[str]:
    """In order of appearance, and `all` last."""
    return [name for name in dict.fromkeys(score.slice for score in scores) if name != "all"] + ["all"]


def results(metrics: Sequence[Metric], task: str, scores: Sequence[ItemScore], seed: int = 0) -> list[dict]:
    """One row a slice and metric. `n`: items, for text tokens; `errors`: items that could not be scored, as a whole or by
    this metric; `trimmed`: with a shortened prompt. Raises where no item could be scored: that is no score of 0."""
    if scores and all(score.error for score in scores):
        raise BadRequest(f"None of the {len(scores)} items of {task} could be scored: {scores[0].error}")
    rows = []
    for name in slices(scores):
        chosen = [score for score in scores if name in ("all", score.slice)]
        for metric in metrics:
            held = [score for score in chosen if score.value(metric.name) is not None]
            if not held:
                continue
            above = [float(score.metrics[metric.name][0]) for score in held]
            below = [float(score.metrics[metric.name][1]) for score in held]
            found = wilson(round(sum(above)), len(held)) if metric.share else bootstrap(above, below, seed)
            rows.append({
                "task": task, "slice": name, "metric": metric.name, "value": found.value, "low": found.low,
                "high": found.high, "n": sum(score.n for score in held), "items": len(held), "unit": metric.unit,
                "chance": metric.chance, "errors": sum(score.failed(metric.name) for score in chosen),
                "trimmed": sum(bool(score.details.get("trimmed")) for score in chosen),
            })  # fmt: skip
    return rows


def compare(metrics: Sequence[Metric], task: str, before: Sequence[ItemScore], after: Sequence[ItemScore],
            seed: int = 0) -> list[dict]:  # fmt: skip
    """One row a slice and metric that both runs have: `statistics.Comparison` as a dict, with task, slice and metric."""
    rows = []
    for name, metric, old, new in _pairs(metrics, before, after):
        above, weights = _column(old, metric.name, 0), _column(old, metric.name, 1)
        if metric.share:
            made = compare_scores(_hits(above), _hits(_column(new, metric.name, 0)), metric.chance or 0.0)
        else:
            other = _column(new, metric.name, 1)
            if any(None not in (weights[i], other[i]) and weights[i] != other[i] for i in weights):
                continue  # per token, of two tokenizers: no item has one denominator
            made = compare_values(above, _column(new, metric.name, 0), weights, metric.higher_is_better, seed)
        rows.append({"task": task, "slice": name, "metric": metric.name, **made.as_dict(), "chance": metric.chance})
    return rows


def _column(scores: dict[str, ItemScore], metric: str, part: int) -> dict[str, float | None]:
    return {item: None if score.value(metric) is None else score.metrics[metric][part] for item, score in scores.items()}


def _hits(column: dict[str, float | None]) -> dict[str, bool | None]:
    return {item: None if value is None else value > 0.5 for item, value in column.items()}


def flipped(metrics: Sequence[Metric], before: Sequence[ItemScore], after: Sequence[ItemScore]) -> list[dict]:
    """{item, metric, was, is, before, after}: what changed sides, with both items' details."""
    found = []
    for name, metric, old, new in _pairs(metrics, before, after):
        if name == "all" and metric.share:
            for item, score in old.items():
                was, now = score.value(metric.name), new[item].value(metric.name)
                if None not in (was, now) and was != now:
                    found.append({"item": item, "metric": metric.name, "was": bool(was), "is": bool(now),
                                  "before": dict(score.details), "after": dict(new[item].details)})  # fmt: skip
    return found


def _pairs(metrics: Sequence[Metric], before, after) -> Iterator[tuple[str, Metric, dict, dict]]:
    """(slice, metric, items before, items after) for metrics that both runs hold; the same items in both, or refused."""
    old, new = ({score.item: score for score in scores} for scores in (before, after))
    if set(old) != set(new):
        odd = sorted(set(old) ^ set(new))
        raise BadRequest(f"The two runs differ in {len(odd)} items (such as {odd[0]}); run both with the same tasks and --limit.")
    for name in slices(before):
        chosen = {i: s for i, s in old.items() if name in ("all", s.slice)}
        for metric in metrics:
            both = [i for i in chosen if metric.name in chosen[i].metrics and metric.name in new[i].metrics]
            if both:
                able = [i for i in chosen if metric.name in chosen[i].metrics or metric.name in new[i].metrics]
                yield name, metric, {i: chosen[i] for i in able}, {i: new[i] for i in able}
