"""What a task is, and a run of one: a score for every item, on disk as it is known.

    task = make_task("mmlu", model, limit=57)
    scores = run(task, model, "run.jsonl")            killed and started again, it goes on with the next item

A metric of an item is a fraction `(above, below)`: (1, 1) for right, (nats, tokens) for a KL, (bits, bytes) for text, and
NOT_JUDGED where it was asked for and could not be told. A slice scores sum(above) / sum(below), so items of unequal size
weigh by what they hold, and two runs are compared item by item.
An item is scored alone, whatever stands beside it: batch, order, shard and resume change no record (float32). An item that
could not be scored carries `error` and no metrics; it is counted, and never a zero.

A new task is one file with a class that has `name`, `metrics`, `items()` and `score(model, items)`, a function
`make(model, limit, **options)` that builds it, and a line in TASKS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from labkit.errors import BadRequest
from labkit.measure.record import Record, RecordWriter, read_records

# name -> module with a function `make(model, limit=None, **options) -> Task`
TASKS = {
    "text": "labkit.evals.text_task",
    "humaneval": "labkit.evals.humaneval",
    "mmlu": "labkit.evals.mmlu",
    "structured": "labkit.evals.structured",
}
NOT_JUDGED = (0.0, 0.0)


@dataclass(frozen=True)
class Metric:
    """`share`: every item is 0 or 1 (Wilson, McNemar); else a ratio of sums (bootstrap over items).

    `chance`: what guessing gives; a score whose interval reaches it is at the floor and cannot regress."""

    name: str
    unit: str = ""
    higher_is_better: bool = True
    share: bool = False
    chance: float | None = None


@dataclass(frozen=True)
class ItemScore:
    """One item's result. `details`, in plain JSON (lists, no tuples), is for reading: what was chosen or written, token ids."""

    item: str
    slice: str = "all"
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    error: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1  # what it counts for in a report: 1, or a passage's scored tokens

    def value(self, metric: str) -> float | None:
        """above / below; None where this item has no such metric."""
        above, below = self.metrics.get(metric, NOT_JUDGED)
        return above / below if below else None

    def failed(self, metric: str) -> bool:
        """Whether it was asked for and could not be told; an item that has no such metric was not asked."""
        return self.error is not None or (metric in self.metrics and self.value(metric) is None)


class Task(Protocol):
    """An item is any object with an `id`; `score` gives one ItemScore for each, in order, as soon as it is known.

    `metrics[0]` is the primary one: what is compared first, and what can still move when a score is at the floor."""

    name: str
    metrics: tuple[Metric, ...]

    def items(self) -> Sequence[Any]: ...

    def score(self, model, items: Sequence[Any]) -> Iterable[ItemScore]: ...


def make_task(name: str, model, limit: int | None = None, **options) -> Task:
    """A task of the registry, or of a JSONL file where `name` is the path of one."""
    if name in TASKS:
        return import_module(TASKS[name]).make(model, limit, **options)
    if Path(name).suffix == ".jsonl" or Path(name).is_file():
        from labkit.evals.own_data import make

        return make(model, limit, path=name, **options)
    raise BadRequest(f"Task {name!r} is unknown; choose from {', '.join(TASKS)}, or give a .jsonl file of your own.")


def run(task: Task, model, path: str | Path | None = None, *, settings: Mapping[str, Any] | None = None,
        shard: tuple[int, int] = (0, 1), batch: int = 16,
        progress: Callable[[str], object] = lambda line: None) -> list[ItemScore]:  # fmt: skip
    """Scores of every item in order; those that the file at `path` holds already are read, not computed.

    `settings` say what was run (recipe, KV format, shots): a file with others is refused. `shard` (i, n): every n-th item
    from the i-th on. `batch` items are handed to the task at once: what a killed run loses at most is one batch."""
    part, parts = shard
    if not 0 <= part < parts or batch < 1:
        raise BadRequest(f"Shard {part} of {parts} in batches of {batch}; give 0 to n - 1 of n, and at least one item.")
    items = list(task.items())[part::parts]
    if not items:
        raise BadRequest(f"The task {task.name} has no item here; raise the limit, or use fewer shards.")
    settings = {"model": getattr(model, "name", None), "revision": getattr(model, "revision", None), **(settings or {})}
    if path is None:
        return list(_scored(task, model, items, batch, progress))
    known = {score.item: score for score in read_scores(path, task.name, settings)} if Path(path).exists() else {}
    missing = [item for item in items if item.id not in known]
    with RecordWriter(path) as writer:
        for score in _scored(task, model, missing, batch, progress):
            writer.write(as_record(task, score, settings))
            known[score.item] = score
    return [known[item.id] for item in items]


def _scored(task: Task, model, items: Sequence, batch: int, progress) -> Iterator[ItemScore]:
    for start in range(0, len(items), batch):
        chunk = items[start : start + batch]
        for score in task.score(model, chunk):
            yield score
            progress(f"{task.name}: {score.item}")


def as_record(task: Task, score: ItemScore, settings: Mapping[str, Any]) -> Record:
    """An item as a line of a result file; its value is the primary metric's."""
    primary = task.metrics[0]
    return Record(
        f"eval.{task.name}", score.value(primary.name), primary.unit, n=score.n, model=settings.get("model"),
        revision=settings.get("revision"), dtype=settings.get("dtype"), device=settings.get("device"), item=score.item,
        notes=score.error, seed=settings.get("seed"),
        details={"metric": primary.name, "slice": score.slice, "settings": dict(settings),
                 "metrics": {name: list(pair) for name, pair in score.metrics.items()}, "item": dict(score.details)},
    )  # fmt: skip


def read_scores(path: str | Path, task: str, settings: Mapping[str, Any] | None = None) -> list[ItemScore]:
    """The items of one task in a result file; with `settings`, only if they were run under these."""
    found = []
    for record in read_records(path):
        if record.what == f"eval.{task}":
            about = record.details
            differing = [key for key, value in (settings or {}).items() if about["settings"].get(key) != value]
            if differing:
                key = differing[0]
                raise BadRequest(f"{Path(path).name} holds {task} with {key} {about['settings'].get(key)!r}, and this run "
                                 f"has {settings[key]!r}; use another file, or the same options.")  # fmt: skip
            pairs = {name: tuple(pair) for name, pair in about["metrics"].items()}
            found.append(ItemScore(record.item, about["slice"], pairs, record.notes, about["item"], record.n))
    return found


def tasks_in(path: str | Path) -> list[str]:
    """The tasks that a result file holds, in order."""
    names = (record.what.removeprefix("eval.") for record in read_records(path) if record.what.startswith("eval."))
    return list(dict.fromkeys(names))
