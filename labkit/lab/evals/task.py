"""Tasks, and runs of tasks: every item's score is written to disk as soon as it is known.

A metric of an item is a fraction `(above, below)`: (1, 1) for right, (nats, tokens) for a KL,
(bits, bytes) for text, and NOT_JUDGED if it could not be computed. The score of a slice is
sum(above) / sum(below), so items weigh by their size and two runs can be compared item by item.

Each item is scored alone: in float32, batch size, order and resuming change no record. An item that
could not be scored has an `error` and no metrics. It is counted as an error, never as a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from labkit.errors import BadRequest
from labkit.lab.measure.record import Record, RecordWriter, read_records

NOT_JUDGED = (0.0, 0.0)


@dataclass(frozen=True)
class Metric:
    """A metric of a task.

    share: True if each item scores 0 or 1: Wilson intervals and McNemar's test. False if
        the score is a ratio of sums: bootstrap for both.
    chance: the score of a random choice. A score whose interval contains it is at the floor.
    """

    name: str
    unit: str = ""
    higher_is_better: bool = True
    share: bool = False
    chance: float | None = None


@dataclass(frozen=True)
class ItemScore:
    """One item's result.

    details: facts for a reader, such as the chosen answer, the text and token ids. They are
        plain JSON: lists, no tuples.
    n: the count of this item in a report: 1, or the number of a passage's scored tokens.
    """

    item: str
    slice: str = "all"
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    error: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1

    def value(self, metric: str) -> float | None:
        """Return above / below, or None if this item has no such metric."""
        above, below = self.metrics.get(metric, NOT_JUDGED)
        return above / below if below else None

    def failed(self, metric: str) -> bool:
        """Return True if the metric was requested but could not be computed."""
        return self.error is not None or (metric in self.metrics and self.value(metric) is None)


class Task(Protocol):
    """The contract of a task.

    An item is any object with an `id`. `score` yields one ItemScore per item, in order.
    `metrics[0]` is the primary metric: it is compared first, and it can still move when a
    share is at the floor.
    """

    name: str
    metrics: tuple[Metric, ...]

    def items(self) -> Sequence[Any]: ...

    def score(self, model, items: Sequence[Any]) -> Iterable[ItemScore]: ...


def run(
    task: Task,
    model,
    path: str | Path | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    batch: int = 16,
    progress: Callable[[str], object] = lambda line: None,
) -> list[ItemScore]:
    """Return the scores of all items, in order. Items in the file at `path` are not scored again.

    settings: the options of the run, such as recipe, KV format and shots. A file with other
        settings raises BadRequest.
    batch: the number of items that the task gets at once. A killed run loses up to one batch.
    """
    items = list(task.items())
    if not items or batch < 1:
        given = f"{task.name} has {len(items)} items in batches of {batch}"
        raise BadRequest(f"The task {given}; give at least one item and a batch of at least 1.")
    if path is None:
        return list(_scored(task, model, items, batch, progress))
    about = {"model": getattr(model, "name", None), "revision": getattr(model, "revision", None)}
    settings, known = about | dict(settings or {}), {}
    if Path(path).exists():
        known = {score.item: score for score in read_scores(path, task.name, settings)}
    missing = [item for item in items if item.id not in known]
    with RecordWriter(path) as writer:
        for score in _scored(task, model, missing, batch, progress):
            writer.write(as_record(task, score, settings))
            known[score.item] = score
    return [known[item.id] for item in items]


def _scored(task: Task, model, items: Sequence, batch: int, progress) -> Iterator[ItemScore]:
    for start in range(0, len(items), batch):
        for score in task.score(model, items[start : start + batch]):
            yield score
            progress(f"{task.name}: {score.item}")


def as_record(task: Task, score: ItemScore, settings: Mapping[str, Any]) -> Record:
    """Return an item as a line of a result file. Its value is that of the primary metric."""
    primary = task.metrics[0]
    details = {
        "metric": primary.name,
        "slice": score.slice,
        "settings": dict(settings),
        "metrics": {name: list(pair) for name, pair in score.metrics.items()},
        "item": dict(score.details),
    }
    names = ("model", "revision", "dtype", "device", "seed")
    fields = {name: settings.get(name) for name in names} | {"item": score.item, "n": score.n}
    fields |= {"notes": score.error, "details": details}
    return Record(f"eval.{task.name}", score.value(primary.name), primary.unit, **fields)


def read_scores(
    path: str | Path, task: str, settings: Mapping[str, Any] | None = None
) -> list[ItemScore]:
    """Return the items of one task in a result file.

    Raises BadRequest if a record was written with other `settings`.
    """
    scores = []
    for record in read_records(path):
        if record.what != f"eval.{task}":
            continue
        about = record.details
        for key, value in (settings or {}).items():
            if about["settings"].get(key) != value:
                place = f"{task} in {Path(path).name} has {key} {about['settings'].get(key)!r}"
                advice = "use another file or the same options"
                raise BadRequest(f"{place}, and this run has {value!r}; {advice}.")
        metrics = {name: tuple(pair) for name, pair in about["metrics"].items()}
        rest = (record.notes, about["item"], record.n)
        scores.append(ItemScore(record.item, about["slice"], metrics, *rest))
    return scores


def tasks_in(path: str | Path) -> list[str]:
    """Return the names of the tasks in a result file, in order."""
    names = [record.what for record in read_records(path)]
    return [name.removeprefix("eval.") for name in dict.fromkeys(names) if name[:5] == "eval."]
