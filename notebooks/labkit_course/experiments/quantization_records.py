"""Read the recorded table of methods and summarize it over calibration seeds.

data/make_quantization_trials.py writes the records. The spread over seeds is minimum and
maximum, because there are only three seeds. A ratio to rounding is taken per seed on the
same passages. Without a file there are no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.lab.measure.record import Record, read_records

FILE = "quantization_trials.jsonl"
SLICES = ("code", "prose")
Spread = tuple[float, float, float]  # middle, low, high


@dataclass(frozen=True)
class Row:
    """`kl` and `of_rounding` per slice.

    One trial has an interval over passages. Several trials have a range over seeds.
    """

    format: str
    method: str
    bits: float
    seeds: int
    n: int  # tokens scored; only trials on the longest text count
    kl: dict[str, Spread]
    of_rounding: dict[
        str, Spread
    ]  # empty for what is rounded, and where the format has no rounded trial


def recorded() -> list[Record]:
    """Return the records of the project; none if the file is missing."""
    from labkit.files import data_path

    path = Path(data_path(FILE))
    return [r for r in read_records(path) if r.what == "quantization.kl"] if path.is_file() else []


def rows(records: Sequence[Record]) -> list[Row]:
    """Return one row per format and method, sorted by descending bits and then loss."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.details["format"], record.details["method"]), []).append(record)
    found = []
    for key, trials in groups.items():
        most = max(record.n for record in trials)
        groups[key] = [record for record in trials if record.n == most]
    for (format, method), trials in groups.items():
        kls = {s: [r.details["slices"][s]["kl"] for r in trials] for s in SLICES}
        base = groups.get((format, "rtn")) if method != "rtn" else None
        base = base if base and base[0].n == trials[0].n else None
        ratios = (
            {s: [kl[0] / base[0].details["slices"][s]["kl"][0] for kl in kls[s]] for s in SLICES}
            if base
            else {}
        )
        found.append(
            Row(
                format,
                method,
                trials[0].details["bits"],
                len(trials),
                trials[0].n,
                {
                    s: tuple(kls[s][0]) if len(trials) == 1 else spread([kl[0] for kl in kls[s]])
                    for s in SLICES
                },
                {s: spread(values) for s, values in ratios.items()},
            )
        )
    return sorted(
        found, key=lambda row: (-row.bits, row.format, -sum(kl[0] for kl in row.kl.values()))
    )


def spread(values: Sequence[float]) -> Spread:
    """Return mean, minimum and maximum."""
    return sum(values) / len(values), min(values), max(values)
