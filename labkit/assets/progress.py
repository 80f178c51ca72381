"""What a person sees while something is fetched: a bar on a terminal, an occasional line elsewhere.

Everything goes to stderr, because stdout may be the one JSON object that a program reads.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager

EVERY_S = 5.0  # a line at most this often where there is no terminal (CI logs, a notebook's output)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def size(num_bytes: float) -> str:
    """1234567 -> '1.2 MB' (decimal, as download sizes are usually given)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} B"


@contextmanager
def progress(title: str, total: int):
    """Yields `update(done)`, with `done` in bytes out of `total`."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("  {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda done: bar.update(task, completed=min(done, total))
        return

    last = time.monotonic()

    def update(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY_S:
            last = time.monotonic()
            say(f"  {title}: {size(done)} of {size(total)} ({100 * min(done, total) // max(total, 1)} %)")

    yield update
