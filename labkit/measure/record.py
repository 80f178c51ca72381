"""Results as records: one JSON object a line, written so that a killed run loses at most the item in flight.

Each record is written whole, flushed and fsynced. A run that is started again opens the same file, cuts
off a half last line, and asks `done(...)` which items it already has. Every record carries what is needed
to repeat it: model and revision, dtype, device, threads, seed, machine, versions, date.
When it loses: an fsync costs milliseconds; write one record an item, not one a token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit.errors import BadRequest
from labkit.measure.machine import machine


def _today() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Record:
    """One result. `low`/`high` bound `value` at 95 % unless `notes` says otherwise; timings are in seconds."""

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
    item: str | None = None                 # which item of a task or setting of a sweep: what `done` asks for
    notes: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=lambda: machine().as_dict())
    versions: dict[str, str] = field(default_factory=lambda: dict(machine().versions))
    date: str = field(default_factory=_today)

    def __post_init__(self):
        if not self.what:
            raise BadRequest("a record without a name says nothing; give `what`, such as 'decode.tpot'.")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def comparable(self) -> dict[str, Any]:
        """What must be equal between two runs with equal seeds: everything but the date (and timings, by `unit`)."""
        kept = {key: value for key, value in asdict(self).items() if key != "date"}
        if self.unit in ("s", "ms", "tok/s", "GB/s"):
            kept = {key: value for key, value in kept.items() if key not in ("value", "low", "high", "details")}
        return kept


class RecordWriter:
    """Appends records to a JSON Lines file; opening one cuts off what a killed run left half written."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_half_line(self.path)
        self._seen = set(_keys(read_records(self.path))) if self.path.exists() else set()
        self._file = open(self.path, "a", encoding="utf-8", newline="\n")

    def write(self, record: Record) -> None:
        line = json.dumps(record.as_dict(), ensure_ascii=False, allow_nan=False, default=str)
        self._file.write(line + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._seen.update(_keys([record]))

    def done(self, what: str, item: str | None = None) -> bool:
        """Whether the file already holds this result, so that a resumed run can skip it."""
        return (what, item) in self._seen

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def read_records(path: str | Path) -> list[Record]:
    """All whole records of a file; a half last line is left out, a broken line before it is an error."""
    return list(_read(Path(path)))


def _read(path: Path) -> Iterator[Record]:
    known = set(Record.__dataclass_fields__)
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):          # what follows the last newline is not a record
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            yield Record(**{key: value for key, value in entry.items() if key in known})
        except (ValueError, TypeError) as error:
            raise BadRequest(f"line {number} of {path.name} is not a record ({error}); "
                             "remove that line or write to a new file.") from None


def _keys(records) -> Iterator[tuple[str, str | None]]:
    return ((record.what, record.item) for record in records)


def _cut_half_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with open(path, "r+b") as file:
            file.truncate(whole)
