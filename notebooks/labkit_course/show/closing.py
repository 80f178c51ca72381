"""The closing table of a notebook: predicted and measured quantities, written as records.

A line is added once, so the table for people and the result file for programs agree. A measured
value is a number, or a Timing or Ratio of `labkit.lab.measure.clock` with its interval.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pandas
import torch

from labkit.errors import BadRequest
from labkit.lab.measure.clock import Ratio, Timing
from labkit.lab.measure.record import Record, RecordWriter
from labkit_course.show.tables import short, table

SHOWN = {"s": ("ms", 1e3)}  # seconds in data, ms in tables


@dataclass(frozen=True)
class Line:
    what: str
    unit: str
    predicted: float | None
    value: float
    low: float | None = None
    high: float | None = None
    n: int = 1


@dataclass
class Closing:
    """The lines of one run; `dtype`, `device` and `threads` go into every record."""

    model: str | None
    revision: str | None
    dtype: str
    device: str
    threads: int
    lines: list[Line] = field(default_factory=list)

    @classmethod
    def of(cls, model, dtype: str, device: str) -> Closing:
        """Start the table of a run of `model`, a decoder; the threads are those of torch."""
        return cls(model.name, model.revision, dtype, device, torch.get_num_threads())

    def add(self, what: str, unit: str, predicted: float | None, measured, n: int = 1) -> None:
        """Add a line; `n` is the number of repeats of a ratio or number (a timing has its own)."""
        if any(line.what == what for line in self.lines):
            raise BadRequest(
                f"{what!r} is already in the closing table; give each line its own name."
            )
        if isinstance(measured, Timing):
            spread = measured.median_s, measured.low_s, measured.high_s, len(measured.times_s)
        elif isinstance(measured, Ratio):
            wide = measured.high > measured.low  # one round alone has no interval
            interval = (measured.low, measured.high) if wide else (None, None)
            spread = measured.value, *interval, n
        else:
            spread = measured, None, None, n
        self.lines.append(Line(what, unit, predicted, *spread))

    def records(self) -> list[Record]:
        """Return the lines as records; a prediction is in `details`."""
        about = {name: value for name, value in vars(self).items() if name != "lines"}
        records = []
        for line in self.lines:
            values = line.what, line.value, line.unit, line.n, line.low, line.high
            records.append(Record(*values, details={"predicted": line.predicted}, **about))
        return records

    def write(self, path: str | Path) -> None:
        """Write the records to the result file `path`, JSON Lines."""
        with RecordWriter(path) as writer:
            for record in self.records():
                writer.write(record)

    def table(self) -> pandas.DataFrame:
        """Return the lines as a table: predicted, measured, and the interval."""
        return table([_row(line) for line in self.lines])


def _row(line: Line) -> dict:
    unit, factor = SHOWN.get(line.unit, (line.unit, 1))

    def show(value):
        if value is None:
            return None
        return f"{value * factor:,}" if isinstance(value, int) else short(value * factor)

    interval = None if line.low is None else f"{show(line.low)} – {show(line.high)}"
    return {
        "what": line.what,
        "unit": unit,
        "predicted": show(line.predicted),
        "measured": show(line.value),
        "interval": interval,
        "n": line.n,
    }
