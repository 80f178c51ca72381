"""Where a run is: one line that rewrites itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Tells which notebook and cell is at work; `stream` is the standard error unless given."""

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()

    def start(self, name: str) -> None:
        """A notebook begins."""
        self.name, self.began = name, time.perf_counter()
        self._line(f"{name}: starting")

    def cell(self, number: int, of_how_many: int) -> None:
        """Code cell `number` begins."""
        self._line(f"{self.name}: cell {number}/{of_how_many}, {self.seconds:.0f} s")

    def end(self, error: str | None) -> None:
        """The notebook ended, well or with a sentence."""
        self._line(f"{self.name}: {'failed: ' + error if error else 'done'} ({self.seconds:.1f} s)")
        if self.live:
            print(file=self.stream)

    @property
    def seconds(self) -> float:
        """Seconds since the notebook began."""
        return time.perf_counter() - self.began

    def _line(self, text: str) -> None:
        if self.live:
            print(f"\r\x1b[2K{text}", end="", file=self.stream, flush=True)
        else:
            print(text, file=self.stream, flush=True)
