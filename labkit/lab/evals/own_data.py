"""Your own prompts as a task: a JSONL file with one object per line.

    {"prompt": "Which tax form is for ...?", "reference": "Form 12", "wrong": "Form 21"}
    {"prompt": "Answer as JSON ...", "check": {"kind": "json", "schema": {"type": "object"}}, "slice": "forms"}

Give the path of the file as the name of the task. A line needs a `prompt`, and a `reference` or a
`check`. `wrong` adds a margin, `slice` a row of its own, and `id` a name (default: the line number).
`prompt_task` describes how items are judged. A line that is not valid stops the run before it
starts, because a score without that item would be the score of another set. Prompts and answers
appear only in the file of records.
"""

from __future__ import annotations

import json
from pathlib import Path

from labkit.errors import BadRequest
from labkit.lab.evals.prompt_task import AnswerTask, Asked, asked_from


def make(model, limit: int | None = None, *, path: str | Path, **options) -> AnswerTask:
    return AnswerTask(Path(path).stem, read_items(path)[:limit], **options)


def read_items(path: str | Path) -> tuple[Asked, ...]:
    """Return every line as an item.

    Raises BadRequest with the line number if a line is not valid.
    """
    path, items = Path(path), {}
    if not path.is_file():
        raise BadRequest(f"There is no file {str(path)!r}; give a JSONL file or a task.")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        place = f"{path.name} is not UTF-8 at byte {error.start}"
        raise BadRequest(f"{place}; save it as UTF-8.") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = _item(line, number)
            if item.id in items:
                raise BadRequest(f"another line has the id {item.id!r}; use each id once.")
        except BadRequest as error:
            raise BadRequest(f"Line {number} of {path.name}: {error}") from None
        items[item.id] = item
    if not items:
        raise BadRequest(f"{path.name} is empty; write one object with a prompt per line.")
    return tuple(items.values())


def _item(line: str, number: int) -> Asked:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"it is not JSON ({error}); write one object per line.") from None
    if not isinstance(entry, dict):
        raise BadRequest(f"it is {line.strip()[:40]!r}; write one object per line.")
    item = asked_from(entry, str(number))
    if item.check is not None and item.check.kind == "exact" and item.reference is None:
        raise BadRequest("it has a check of kind exact and no reference; add a reference.")
    return item
