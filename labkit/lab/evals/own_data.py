"""Your own prompts as a task: a JSONL file, one object per line, in place of a task's name.

    {"prompt": "Which tax form is for ...?", "reference": "Form 12", "wrong": "Form 21"}
    {"prompt": "Answer as JSON ...", "check": {"kind": "json", "schema": {"type": "object"}}, "slice": "forms"}

A line needs a `prompt` and a `reference` or a `check`; `wrong` adds a margin, `slice` a row of its
own, `id` a name (default: its line number). Items are judged as `prompt_task` says. A line that is
not valid stops the run before it starts: a score that silently leaves out items is the score of
another set. Prompts and answers appear in no result but the file of records.
"""

from __future__ import annotations

import json
from pathlib import Path

from labkit.errors import BadRequest
from labkit.lab.evals.prompt_task import AnswerTask, Asked, asked_from


def make(model, limit: int | None = None, *, path: str | Path, **options) -> AnswerTask:
    return AnswerTask(Path(path).stem, read_items(path)[:limit], **options)


def read_items(path: str | Path) -> tuple[Asked, ...]:
    """Return every line as an item. Raises BadRequest with the line number if one is invalid."""
    path, items = Path(path), {}
    if not path.is_file():
        raise BadRequest(
            f"There is no file {str(path)!r}; give the path of a JSONL file, or the name of a task."
        )
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as reason:
        raise BadRequest(
            f"{path.name} is not UTF-8 at byte {reason.start}; save it as UTF-8."
        ) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as reason:
            raise BadRequest(
                f"Line {number} of {path.name} is not JSON ({reason}); write one object per line."
            ) from None
        if not isinstance(entry, dict):
            raise BadRequest(
                f"Line {number} of {path.name} is {line.strip()[:40]!r}; write one object per line."
            )
        try:
            item = asked_from(entry, str(number))
        except BadRequest as reason:
            raise BadRequest(f"Line {number} of {path.name}: {reason}") from None
        if item.id in items:
            raise BadRequest(
                f"Line {number} of {path.name} has the id {item.id!r} of another line; give each its own."
            )
        if item.check is not None and item.check.kind == "exact" and item.reference is None:
            raise BadRequest(
                f"Line {number} of {path.name} has a check of kind exact and no reference; add one."
            )
        items[item.id] = item
    if not items:
        raise BadRequest(f"{path.name} is empty; write one object with a prompt per line.")
    return tuple(items.values())
