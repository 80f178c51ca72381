"""`labkit doctor`."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from labkit.lab.cli.answer import Json, answer


def doctor(
    network: Annotated[bool, Option(help="Check that the package index answers.")] = False,
    as_json: Json = False,
) -> int:
    """Show what this machine can do, what is missing, and how to fix it.

    Exits 1 if the quick lab cannot run.

    \b
    Example:  labkit doctor
    """
    from labkit.lab.doctor import examine, render

    diagnosis = examine(network=network)
    answer(diagnosis, as_json, render(diagnosis))
    return 0 if diagnosis["ok"] else 1
