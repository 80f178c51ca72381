"""Tasks that measure what a change to a model costs, item by item.

    task = make_task("mmlu", model, limit=57)
    scores = run(task, model, "run.jsonl")          labkit.lab.evals.task
    results(task.metrics, task.name, scores)        labkit.lab.evals.report

`text` needs no generation and judges every number format. To add a task, write one file with a
class that has `name`, `metrics`, `items()` and `score(model, items)`, a function
`make(model, limit, **options)` that builds it, and add a line to TASKS.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from labkit.errors import BadRequest

TASKS = {name: f"{__name__}.{name}" for name in ("text", "humaneval", "mmlu", "structured")}


def make_task(name: str, model, limit: int | None = None, **options):
    """Return a task of the registry, or the prompts of a JSONL file if `name` is its path.

    `limit` is the number of items (for `text`, of tokens per slice). Raises BadRequest if there is
    no such task or file.
    """
    if name in TASKS:
        return import_module(TASKS[name]).make(model, limit, **options)
    if not is_own(name):
        raise BadRequest(
            f"Task {name!r} is unknown; choose from {', '.join(TASKS)}, or give a .jsonl file of "
            "your own."
        )
    return import_module(f"{__name__}.own_data").make(model, limit, path=name, **options)


def is_own(name: str) -> bool:
    """Return True if `name` is the path of a file of your own prompts."""
    return Path(name).suffix == ".jsonl" or Path(name).is_file()
