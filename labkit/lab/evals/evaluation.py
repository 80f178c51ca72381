"""Score tasks on one model and compare them with an earlier run.

    rows = evaluate(Evaluation(["mmlu"], ModelUnderTest(recipe="int4")))["results"]

`labkit eval` parses its options into an `Evaluation` and prints what `evaluate` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.errors import BadRequest
from labkit.lab.evals import is_own, make_task
from labkit.lab.evals.model_under_test import ModelUnderTest
from labkit.lab.evals.report import compare, flipped, results
from labkit.lab.evals.task import read_scores, run, tasks_in

# Attributes of tasks that a result file records. Two runs are compared only if these are equal.
RECORDED = ("slices", "shots", "scoring", "languages", "seed", "mode", "max_new_tokens")


@dataclass(frozen=True)
class Evaluation:
    """A request to score tasks on a model.

    tasks: names of tasks or paths of .jsonl files.
    limit: the maximum number of items per task; for text, of tokens per slice.
    options: options by task name; those of your own files are under "own".
    against: the file of an earlier run to compare with.
    out: the file for the records of all items. A killed run resumes from it.
    """

    tasks: Sequence[str]
    model: ModelUnderTest
    limit: int | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    against: Path | None = None
    out: Path | None = None

    def __post_init__(self):
        for name in self.tasks:
            if list(self.tasks).count(name) > 1:
                raise BadRequest(f"Task {name!r} was given twice; give each task once.")
            make_task(name, None, self.limit, **self.options_of(name))  # raises before loading
        if self.model.peer:
            from labkit.lab.bench import peers

            if list(self.tasks) != ["text"]:
                others = ", ".join(self.tasks)
                raise BadRequest(f"--peer {self.model.peer} needs the task text; got {others}.")
            peers.check([self.model.peer], peers.QUANTIZED)
        if self.against is not None:
            self._check_earlier(self.against)

    def options_of(self, name: str) -> Mapping[str, Any]:
        return self.options.get("own" if is_own(name) else name, {})

    def _check_earlier(self, against: Path) -> None:
        if not against.is_file():
            raise BadRequest(f"There is no file {against}; make it by a run with --out {against}.")
        if self.out is not None and self.out.exists() and self.out.samefile(against):
            raise BadRequest(f"--out and --against are both {against}; give another --out.")
        known = tasks_in(against)
        for name in (Path(name).stem if is_own(name) else name for name in self.tasks):
            if name not in known:
                tasks = ", ".join(known) or "no task"
                raise BadRequest(
                    f"{against} has {tasks}, not {name}; run {name} with --out {against}."
                )


def evaluate(asked: Evaluation, progress: Callable[[str], object] = lambda line: None) -> dict:
    """Run every task and return the result of `labkit eval --json`.

    Its keys are results (rows), recipe, kv_format, peer, model and notes. With `against`,
    there are also comparisons (rows) and flipped (items).
    """
    subject, seed = asked.model, asked.model.seed
    rows, comparisons, flips, notes = [], [], [], {}
    for name in asked.tasks:
        model = subject.model(name)
        task = subject.task(name, asked.limit, **asked.options_of(name))
        chosen = {key: getattr(task, key) for key in RECORDED if hasattr(task, key)}
        chosen = {key: list(v) if isinstance(v, tuple) else v for key, v in chosen.items()}
        before = read_scores(asked.against, task.name, chosen) if asked.against else None
        settings = {**subject.settings(name), "limit": asked.limit, "seed": seed, **chosen}
        scores = run(task, model, asked.out, settings=settings, progress=progress)
        rows += results(task.metrics, task.name, scores, seed)
        if lines := list(getattr(task, "notes", ())):
            notes[task.name] = lines
        if before:
            comparisons += compare(task.metrics, task.name, before, scores, seed)
            changed = flipped(task.metrics, before, scores)
            flips += [{"task": task.name, **flip} for flip in changed]
    about = {name: getattr(subject, name) for name in ("recipe", "kv_format", "peer")}
    result = {"results": rows, **about, "model": subject.plain.name, "notes": notes}
    if asked.against is not None:
        result |= {"against": str(asked.against), "comparisons": comparisons, "flipped": flips}
    return result
