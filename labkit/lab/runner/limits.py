"""The limits of a run, and the exception for a notebook that fails."""

from __future__ import annotations

from dataclasses import dataclass


class NotebookFailure(Exception):
    """A notebook failed; the message says which cell and why."""


@dataclass(frozen=True)
class Limits:
    """The maximum seconds of one notebook, and the maximum output of one cell."""

    seconds: float = 3600.0
    lines: int = 300
    text_bytes: int = 100_000
    all_bytes: int = 1_000_000
