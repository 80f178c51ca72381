"""Print the progress of a run.

On a terminal, one line is rewritten every second. Elsewhere, a new line is printed
every 30 seconds. A line is also printed when a cell begins.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO


class Progress:
    """Print the running notebook and cell to `stream` (default: stderr)."""

    def __init__(self, stream: TextIO | None = None, every_s: float | None = None):
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.every_s = every_s or (1.0 if self.live else 30.0)

    def start(self, name: str) -> None:
        """Report that a notebook begins."""
        self.name, self.began = name, time.perf_counter()
        self._ended = threading.Event()
        self._line("starting")
        self._clock = threading.Thread(target=self._tick, daemon=True)
        self._clock.start()

    def cell(self, number: int, total: int) -> None:
        """Report that code cell `number` begins."""
        self._line(f"cell {number}/{total}")

    def end(self, error: str | None) -> None:
        """Report that the notebook ended; `error` None means success."""
        self._ended.set()
        self._clock.join()
        self._line(f"failed: {error}" if error else "done")
        if self.live:
            print(file=self.stream)

    def _tick(self) -> None:
        while not self._ended.wait(self.every_s):
            self._line(self.place)

    def _line(self, place: str) -> None:
        self.place = place
        text = f"{self.name}: {place}, {time.perf_counter() - self.began:.0f} s"
        start, end = ("\r\x1b[2K", "") if self.live else ("", "\n")
        print(f"{start}{text}", end=end, file=self.stream, flush=True)
