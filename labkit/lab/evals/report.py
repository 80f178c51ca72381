"""Scores as rows, one per task, slice and metric, and comparisons of two runs item by item.

    results(metrics, task, scores)              value, low, high, n; chance; items without a score
    compare(metrics, task, before, after)       difference, interval and verdict (see `statistics`)
    flipped(metrics, before, after)             items that are right in only one of the runs, with
                                                the answers that were chosen or written

Every task has a slice `all`. A difference always has its interval: a few items that all changed a
little may say more than a share that moved by ten points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.errors import BadRequest
from labkit.lab.evals.statistics import bootstrap, compare_scores, compare_values, wilson
from labkit.lab.evals.task import ItemScore, Metric


def slices(scores: Sequence[ItemScore]) -> list[str]:
    """Return the slices in order of appearance, and `all` last."""
    return [*dict.fromkeys(score.slice for score in scores if score.slice != "all"), "all"]


def results(
    metrics: Sequence[Metric], task: str, scores: Sequence[ItemScore], seed: int = 0
) -> list[dict]:
    """Return one row per slice and metric.

    `n` counts items, or tokens for text. `errors` counts items that could not be scored, as a
    whole or by this metric. `trimmed` counts items with a shortened prompt. Raises
    BadRequest if no item could be scored.
    """
    if scores and all(score.error for score in scores):
        count = f"None of the {len(scores)} items of {task}"
        raise BadRequest(f"{count} could be scored. The first error: {scores[0].error}")
    rows = []
    for name in slices(scores):
        chosen = [score for score in scores if name in ("all", score.slice)]
        trimmed = sum(bool(score.details.get("trimmed")) for score in chosen)
        for metric in metrics:
            scored = [score for score in chosen if score.value(metric.name) is not None]
            if not scored:
                continue
            above, below = zip(*(score.metrics[metric.name] for score in scored))
            if metric.share:
                interval = wilson(round(sum(above)), len(scored))
            else:
                interval = bootstrap(above, below, seed)
            row = {"task": task, "slice": name, "metric": metric.name, **vars(interval)}
            row |= {"n": sum(score.n for score in scored), "items": len(scored)}
            row |= {"unit": metric.unit, "chance": metric.chance}
            errors = sum(score.failed(metric.name) for score in chosen)
            rows.append(row | {"errors": errors, "trimmed": trimmed})
    return rows


def compare(
    metrics: Sequence[Metric], task: str, before: Sequence, after: Sequence, seed: int = 0
) -> list[dict]:
    """Return one row per slice and metric that both runs have.

    `before` and `after` are the item scores of two runs. A row has the fields of
    `statistics.Comparison`.

    A metric is left out if its items have other denominators in the two runs, such as the
    tokens of two tokenizers. Raises BadRequest if the runs do not have the same items.
    """
    rows = []
    for name, metric, old, new in _pairs(metrics, before, after):
        (above, weights), (other, other_weights) = _columns(old, metric), _columns(new, metric)
        if metric.share:
            hits = ({i: x and x > 0.5 for i, x in column.items()} for column in (above, other))
            comparison = compare_scores(*hits, metric.chance or 0.0)
        else:
            both = [i for i in weights if None not in (weights[i], other_weights[i])]
            if any(weights[i] != other_weights[i] for i in both):
                continue
            comparison = compare_values(above, other, weights, metric.higher_is_better, seed)
        row = {"task": task, "slice": name, "metric": metric.name, **vars(comparison)}
        rows.append(row | {"chance": metric.chance})
    return rows


def _columns(scores: dict[str, ItemScore], metric: Metric) -> tuple[dict, dict]:
    """Return {item: above} and {item: below}, with None for items without this metric."""
    pairs = {
        item: (None, None) if score.value(metric.name) is None else score.metrics[metric.name]
        for item, score in scores.items()
    }
    return {i: above for i, (above, _) in pairs.items()}, {i: b for i, (_, b) in pairs.items()}


def flipped(
    metrics: Sequence[Metric], before: Sequence[ItemScore], after: Sequence[ItemScore]
) -> list[dict]:
    """Return the items that changed between right and wrong.

    Each is a dict of item, metric, was, is, and the details of the item before and after.
    """
    flips = []
    for name, metric, old, new in _pairs(metrics, before, after):
        for item in old if name == "all" and metric.share else ():
            was, now = old[item].value(metric.name), new[item].value(metric.name)
            if None not in (was, now) and was != now:
                flip = {"item": item, "metric": metric.name, "was": bool(was), "is": bool(now)}
                flip |= {"before": dict(old[item].details), "after": dict(new[item].details)}
                flips.append(flip)
    return flips


def _pairs(metrics: Sequence[Metric], before, after) -> Iterator[tuple[str, Metric, dict, dict]]:
    """Yield (slice, metric, items before, items after) for metrics that both runs have.

    Raises BadRequest if the two runs do not have the same items.
    """
    old, new = ({score.item: score for score in scores} for scores in (before, after))
    if set(old) != set(new):
        odd = sorted(set(old) ^ set(new))
        place = f"{len(odd)} items (such as {odd[0]})"
        raise BadRequest(f"The two runs differ in {place}; give both the same task and --limit.")
    for name in slices(before):
        chosen = [i for i in old if name in ("all", old[i].slice)]
        for metric in metrics:
            has = {i: [metric.name in run[i].metrics for run in (old, new)] for i in chosen}
            if any(map(all, has.values())):
                able = [i for i in chosen if any(has[i])]
                yield name, metric, {i: old[i] for i in able}, {i: new[i] for i in able}
