"""Your own prompts as a task: a JSONL file, one object a line, given in place of a task's name.

    {"prompt": "Which tax form is for ...?", "reference": "Form 12", "wrong": "Form 21"}
    {"prompt": "Answer as JSON ...", "check": {"kind": "json", "schema": {"type": "object"}}, "slice": "forms"}

A line needs a `prompt`, and a `reference` or a `check`; `wrong` adds a margin, `slice` a row of its own, `id` a name (else
its line number). Judged as in `answers`. A line that cannot be used stops the run before it starts, by its number: an item
left out in silence would make the score one of another set. What a file holds leaves the machine in no result but the
file of records, which keeps what was written.
"""

from __future__ import annotations

import json
from pathlib import Path

from labkit.errors import BadRequest
from labkit.evals.answers import AnswerTask, Asked, asked_from


def make(model, limit: int | None = None, *, path: str | Path, **options) -> AnswerTask:
    return AnswerTask(Path(path).stem, read_items(path)[:limit], **options)


def read_items(path: str | Path) -> tuple[Asked, ...]:
    """Every line as an item; refused with its line number where it is none."""
    path, found = Path(path), {}
    if not path.is_file():
        raise BadRequest(f"There is no file {str(path)!r}; give the path of a JSONL file, or the name of a task.")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as reason:
        raise BadRequest(f"{path.name} is not UTF-8 at byte {reason.start}; save it as UTF-8.") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as reason:
            raise BadRequest(f"Line {number} of {path.name} is no JSON ({reason}); write one object a line.") from None
        if not isinstance(entry, dict):
            raise BadRequest(f"Line {number} of {path.name} is {line.strip()[:40]!r}; write one object a line.")
        try:
            item = asked_from(entry, str(number))
        except BadRequest as reason:
            raise BadRequest(f"Line {number} of {path.name}: {reason}") from None
        if item.id in found:
            raise BadRequest(f"Line {number} of {path.name} has the id {item.id!r} of another line; give each its own.")
        if item.check is not None and item.check.kind == "exact" and item.reference is None:
            raise BadRequest(f"Line {number} of {path.name} is to be exactly a reference and has none; add one.")
        found[item.id] = item
    if not found:
        raise BadRequest(f"{path.name} holds no line; write one object with a prompt a line.")
    return tuple(found.values())
