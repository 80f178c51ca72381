"""Write results as records: one JSON object per line; a killed run loses at most one.

Each record is written completely, flushed and fsynced. A run that is started again
opens the same file, removes an incomplete last line, and calls `done(...)` to see which
items the file has. Each record contains what is needed to repeat it: model and
revision, dtype, device, threads, seed, machine, versions, date. Limitation: an fsync
takes milliseconds, so write one record per item, not one per token.
"""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit.errors import BadRequest, Text, check_fields
from labkit.lab.measure.machine import machine


@dataclass(frozen=True)
class Record:
    """One result of a measurement or an evaluation.

    `low` and `high` are the 95 % interval of `value`, unless `notes` says otherwise.
    Times are in seconds. `item` is the item of a task, or the setting of a sweep.
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


class RecordWriter(AbstractContextManager):
    """Append records to a file. Opening it removes an incomplete last line."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._seen: set[tuple[str, str | None]] = set()
        if self.path.exists():
            data = self.path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                os.truncate(self.path, whole)
            self._seen = {(record.what, record.item) for record in read_records(self.path)}
        self._file = open(self.path, "a", encoding="utf-8", newline="\n")

    def write(self, record: Record) -> None:
        """Write a record and flush it to the disk."""
        line = json.dumps(asdict(record), ensure_ascii=False, allow_nan=False, default=str)
        self._file.write(line + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._seen.add((record.what, record.item))

    def done(self, what: str, item: str | None = None) -> bool:
        """Return True if the file already has this result."""
        return (what, item) in self._seen

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *exc) -> None:
        self.close()


def read_records(path: str | Path) -> list[Record]:
    """Return the records of a file, without an incomplete last line.

    Raises BadRequest with the line number if another line is not a record.
    """
    records, known = [], set(Record.__dataclass_fields__)
    lines = Path(path).read_bytes().split(b"\n")[:-1]  # after the last newline: incomplete
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                fields = json.loads(line)
                records.append(Record(**{k: value for k, value in fields.items() if k in known}))
            except (ValueError, TypeError, AttributeError) as error:
                raise BadRequest(
                    f"Line {number} of {path} is not a record ({error}); remove the line."
                ) from None
    return records
