"""Where a run is: one line that rewrites itself on a terminal, plain lines elsewhere.

A cell may work for minutes without a word, so a line also comes with time: every second on a terminal,
every 30 seconds elsewhere.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO


class Progress:
    """Tells which notebook and cell is at work; `stream` is the standard error unless given."""

    def __init__(self, stream: TextIO | None = None, every_s: float | None = None):
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.every_s = every_s or (1.0 if self.live else 30.0)

    def start(self, name: str) -> None:
        """A notebook begins."""
        self.name, self.began, self.where = name, time.perf_counter(), "starting"
        self._ended = threading.Event()
        self._clock = threading.Thread(target=self._tick, daemon=True)
        self._clock.start()
        self._line()

    def cell(self, number: int, of_how_many: int) -> None:
        """Code cell `number` begins."""
        self.where = f"cell {number}/{of_how_many}"
        self._line()

    def end(self, error: str | None) -> None:
        """The notebook ended, well or with a sentence."""
        self._ended.set()
        self._clock.join()
        self.where = f"failed: {error}" if error else "done"
        self._line()
        if self.live:
            print(file=self.stream)

    def _tick(self) -> None:
        while not self._ended.wait(self.every_s):
            self._line()

    def _line(self) -> None:
        text = f"{self.name}: {self.where}, {time.perf_counter() - self.began:.0f} s"
        if self.live:
            print(f"\r\x1b[2K{text}", end="", file=self.stream, flush=True)
        else:
            print(text, file=self.stream, flush=True)
