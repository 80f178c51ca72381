"""Write results as records: one JSON object per line; a killed run loses one item.

Each record is written whole, flushed and fsynced. A run that is started again opens the
same file, cuts off an incomplete last line, and asks `done(...)` which items it already
has. Every record carries what is needed to repeat it: model and revision, dtype,
device, threads, seed, machine, versions, date. Limitation: an fsync takes milliseconds,
so write one record per item and not one per token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit.errors import BadRequest, Text, check_fields
from labkit.lab.measure.machine import machine


@dataclass(frozen=True)
class Record:
    """One result. `low` and `high` bound `value` at 95 % unless `notes` says otherwise.

    Timings are in seconds. `item` is the item of a task or the setting of a sweep.
    """

    what: str
    value: float | int | str | None
    unit: str
    n: int = 1
    low: float | None = None
    high: float | None = None
    seed: int | None = None
    model: str | None = None
    revision: str | None = None
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    item: str | None = None
    notes: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=lambda: machine().as_dict())
    versions: dict[str, str] = field(default_factory=lambda: dict(machine().versions))
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def __post_init__(self):
        check_fields(self, what=Text())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def comparable(self) -> dict[str, Any]:
        """Return the fields that are equal for equal seeds: no date and no timings."""
        left_out = {"date"}
        if self.unit in ("s", "ms", "tok/s", "GB/s"):
            left_out |= {"value", "low", "high", "details"}
        return {key: value for key, value in asdict(self).items() if key not in left_out}


class RecordWriter:
    """Append records to a file; opening it cuts off an incomplete last line."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._seen: set[tuple[str, str | None]] = set()
        if self.path.exists():
            data = self.path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                os.truncate(self.path, whole)
            self._seen = {(record.what, record.item) for record in _read(self.path)}
        self._file = open(self.path, "a", encoding="utf-8", newline="\n")

    def write(self, record: Record) -> None:
        """Write a record and flush it to the disk."""
        line = json.dumps(record.as_dict(), ensure_ascii=False, allow_nan=False, default=str)
        self._file.write(line + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._seen.add((record.what, record.item))

    def done(self, what: str, item: str | None = None) -> bool:
        """Return True if the file already has this result."""
        return (what, item) in self._seen

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def read_records(path: str | Path) -> list[Record]:
    """Return all whole records of a file, without an incomplete last line.

    Raises BadRequest with the line number if another line is not a record.
    """
    return list(_read(Path(path)))


def _read(path: Path) -> Iterator[Record]:
    known = set(Record.__dataclass_fields__)
    whole = path.read_bytes().split(b"\n")[:-1]  # nothing after the last newline is a record
    for number, line in enumerate(whole, start=1):
        if line.strip():
            try:
                fields = json.loads(line)
                yield Record(**{key: value for key, value in fields.items() if key in known})
            except (ValueError, TypeError, AttributeError) as error:
                raise BadRequest(
                    f"line {number} of {path.name} is not a record ({error}); "
                    "remove that line or write to a new file."
                ) from None
