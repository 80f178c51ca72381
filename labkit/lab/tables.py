"""Tables for terminals. Notebooks show theirs with pandas (`labkit_course.show`)."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as text: first column left-aligned, others right-aligned.

    A cell that is None is shown as "-".
    """
    from rich.console import Console
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, header in enumerate(headers):
        grid.add_column(header, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*("-" if cell is None else str(cell) for cell in row))
    text = io.StringIO()
    size = {"width": 400, "height": 100}  # both are needed: a dumb terminal has 80 columns
    Console(file=text, markup=False, emoji=False, highlight=False, **size).print(grid)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def columns_of(entries: Mapping[str, Mapping], columns: Mapping[str, str], first: str) -> str:
    """Return a table with one row per entry, named in the column `first`.

    `columns` maps each header to a format of the entry's keys, such as "{tok_s:.1f}". A
    key that is missing or None is shown as "-".
    """
    rows = [
        (name, *(form.format_map(_Cells(entry)) for form in columns.values()))
        for name, entry in entries.items()
    ]
    return table((first, *columns), rows)


class _Cells(dict):
    def __init__(self, entry: Mapping):
        super().__init__({key: value for key, value in entry.items() if value is not None})

    def __missing__(self, key: str) -> _Dash:
        return _Dash()


class _Dash:
    def __format__(self, form: str) -> str:
        return "-"
