"""HumanEval: 164 functions to write, with their tests; nothing runs here."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache

from labkit.lab.assets import asset_path


@dataclass(frozen=True)
class Problem:
    task_id: str  # "HumanEval/0"
    prompt: str  # imports, signature and docstring, up to where the body begins
    entry_point: str
    canonical_solution: str  # the body
    test: str  # defines check(candidate)


@cache
def humaneval() -> tuple[Problem, ...]:
    """Return all problems in their published order."""
    with gzip.open(asset_path("humaneval"), "rt", encoding="utf-8") as lines:
        return tuple(Problem(**json.loads(line)) for line in lines if line.strip())
