"""The commands of `labkit`; a command is registered here once what it calls exists."""

from __future__ import annotations

from typing import Annotated

import typer

import labkit
from labkit.cli import evaluate, judge, lab, text
from labkit.cli.bench import bench
from labkit.cli.distill import distill

app = typer.Typer(
    name="labkit",
    help="A lab for LLM inference: every optimisation predicted, then measured, then compared, on your machine.",
    epilog="Begin with `labkit doctor`, then `labkit run 01`.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"labkit {labkit.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


app.command()(lab.doctor)
app.command()(lab.pull)
app.command()(lab.run)
app.command()(text.generate)
app.command()(text.plan)
app.command()(judge.quantize)
app.command()(distill)
app.command(name="eval")(evaluate.evaluate)
app.add_typer(bench, name="bench")
