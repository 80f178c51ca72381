"""The closing table of a notebook: each quantity predicted and measured, and the same lines as records.

A line is added once and appears in both, so that the table that a reader sees and the result file that a program
reads cannot part. A measured value is a number, or a Timing or Ratio of `labkit.measure.clock`, which bring their
interval and their number of repeats.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas

from labkit.errors import BadRequest
from labkit.measure.clock import Ratio, Timing
from labkit.measure.record import Record
from labkit.show.tables import short, table

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
    """The lines of one run of one model: `dtype`, `device` and `threads` go into every record."""

    model: str | None
    revision: str | None
    dtype: str
    device: str
    threads: int
    lines: list[Line] = field(default_factory=list)

    def add(self, what: str, unit: str, predicted: float | None, measured, n: int = 1) -> None:
        """One more line; `n` counts the repeats behind a ratio or a number, a timing knows its own."""
        if any(line.what == what for line in self.lines):
            raise BadRequest(f"{what!r} stands in the closing table already; give each line a name of its own.")
        if isinstance(measured, Timing):
            spread = measured.median_s, measured.low_s, measured.high_s, len(measured.times_s)
        elif isinstance(measured, Ratio):
            wide = measured.high > measured.low  # one round alone has no interval
            spread = measured.value, measured.low if wide else None, measured.high if wide else None, n
        else:
            spread = measured, None, None, n
        self.lines.append(Line(what, unit, predicted, *spread))

    def records(self) -> list[Record]:
        """The lines as records; a prediction stands in `details`."""
        about = {key: getattr(self, key) for key in ("model", "revision", "dtype", "device", "threads")}
        return [
            Record(line.what, line.value, line.unit, line.n, line.low, line.high,
                   details={"predicted": line.predicted}, **about)
            for line in self.lines
        ]  # fmt: skip

    def table(self) -> pandas.DataFrame:
        """The lines for people: predicted beside measured, with the interval."""
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
