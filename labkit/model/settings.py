"""The small JSON files of a checkpoint: read whole as an object, or refused by the file's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.errors import BadRequest


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; a file cut short, of another kind or not text is refused in one sentence."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as reason:  # of which JSON's and UTF-8's errors are kinds
        raise BadRequest(f"{path} is not JSON ({reason}): fetch it again.") from reason
    if not isinstance(content, dict):
        raise BadRequest(f"{path} holds a {type(content).__name__} where a JSON object is needed: fetch it again.")
    return content
