"""Make readable DataFrames from rows of dictionaries.

The unit is in the header, never in the cells. Bytes are binary (KiB, MiB, GiB); a column has one
unit, the largest in which its smallest entry is at least 1.
"""

from collections.abc import Mapping, Sequence

import pandas

from labkit.errors import BadRequest
from labkit.plan.units import format_bytes

__all__ = ["format_bytes", "short", "table"]

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# unit in the header -> (factor from the base unit, decimals)
UNITS = {
    "ms": (1e3, 2),
    "s": (1.0, 2),
    "us": (1e6, 1),
    "tok/s": (1.0, 1),
    "GB/s": (1e-9, 1),
    "GFLOP/s": (1e-9, 1),
    "%": (100.0, 1),
    "x": (1.0, 2),
    "tokens": (1.0, 0),
}


def table(rows: Sequence[Mapping], *, units: Mapping[str, str] | None = None) -> pandas.DataFrame:
    """Return a table of `rows` ({column: value}); the first column names the rows.

    `units` gives a column's unit: 'bytes' (binary, chosen per column), one of `UNITS` (values in
    seconds, bytes/s or shares are scaled), or any other word, which goes into the header. None
    shows as an em dash.
    """
    if not rows:
        raise BadRequest("There are no rows; give at least one.")
    units = dict(units or {})
    columns = list(rows[0])
    unknown = sorted(set(units) - set(columns))
    if unknown:
        raise BadRequest(
            f"units were given for {', '.join(unknown)}; the columns are {', '.join(columns)}"
        )
    shown = {}
    for column in columns:
        header, cells = _column(column, [row.get(column) for row in rows], units.get(column))
        shown[header] = cells
    frame = pandas.DataFrame(shown)
    corner = frame.columns[0]
    # The name of the first column stands in the corner, not in a header row of its own.
    return frame.set_index(corner).rename_axis(index=None, columns=corner)


def _column(name: str, values: list, unit: str | None) -> tuple[str, list[str]]:
    if unit == "bytes":
        step = _byte_step([value for value in values if value])
        factor, digits = 1 / 1024**step, 0 if step == 0 else 1
        unit = BYTE_UNITS[step]
        if all(not value or (value * factor) == int(value * factor) for value in values):
            digits = 0
    else:
        factor, digits = UNITS.get(unit, (1, None))
    header = f"{name} [{unit}]" if unit else name
    return header, [_cell(value, factor, digits) for value in values]


def _byte_step(values: list[float]) -> int:
    smallest = min((abs(value) for value in values), default=0)
    step = 0
    while smallest >= 1024 and step < len(BYTE_UNITS) - 1:
        smallest /= 1024
        step += 1
    return step


def _cell(value, factor: float, digits: int | None) -> str:
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if digits is not None:
        return f"{value * factor:,.{digits}f}"
    return f"{value * factor:,}" if isinstance(value, int) else short(value * factor)


def short(value: float) -> str:
    """Format a number with three digits, without a power of ten: 0.0123, 4.5, 1,235."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"
