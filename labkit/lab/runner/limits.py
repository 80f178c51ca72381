"""What a run may take, and the exception that says which limit, or what else, ended it."""

from __future__ import annotations

from dataclasses import dataclass


class NotebookFailure(Exception):
    """The notebook did not run to its end as it should; the message says which cell and why."""


@dataclass(frozen=True)
class Limits:
    """What one notebook (seconds) and the output of one cell (the rest) may take."""

    seconds: float = 3600.0
    lines: int = 300
    text_bytes: int = 100_000
    all_bytes: int = 1_000_000
