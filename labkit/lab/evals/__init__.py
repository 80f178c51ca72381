"""Tasks that measure the cost of a change to a model, item by item.

    task = make_task("mmlu", model, limit=57)
    scores = run(task, model, "run.jsonl")          labkit.lab.evals.task
    results(task.metrics, task.name, scores)        labkit.lab.evals.report

`text` needs no generation and can judge every number format. To add a task, write a file with a
class that has `name`, `metrics`, `items()` and `score(model, items)`, and with a function
`make(model, limit, **options)` that builds it. Then add a line to TASKS.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from labkit.errors import BadRequest

TASKS = {name: f"{__name__}.{name}" for name in ("text", "humaneval", "mmlu", "structured")}


def make_task(name: str, model, limit: int | None = None, **options):
    """Return a task by its name in TASKS, or by the path of a JSONL file with prompts.

    `limit` is the maximum number of items; for `text`, of tokens per slice. Raises
    BadRequest if there is no such task or file.
    """
    if name in TASKS:
        return import_module(TASKS[name]).make(model, limit, **options)
    if not is_own(name):
        allowed = ", ".join(TASKS)
        raise BadRequest(f"Task {name!r} is unknown; choose from {allowed}, or give a .jsonl file.")
    return import_module(f"{__name__}.own_data").make(model, limit, path=name, **options)


def is_own(name: str) -> bool:
    """Return True if `name` is the path of a file with your own prompts."""
    return Path(name).suffix == ".jsonl" or Path(name).is_file()


def check_choices(given: Sequence[str], allowed: Sequence[str], what: str) -> None:
    """Raise BadRequest unless `given` has at least one value, all of them allowed."""
    for value in given or [""]:
        if value not in allowed:
            raise BadRequest(f"{value!r} is not {what}; choose from {', '.join(allowed)}.")
