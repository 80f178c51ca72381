"""The commands of `labkit`."""

from __future__ import annotations

from typing import Annotated

import typer

import labkit
from labkit.lab.cli.bench import bench
from labkit.lab.cli.distill import distill
from labkit.lab.cli.doctor import doctor
from labkit.lab.cli.evaluate import evaluate
from labkit.lab.cli.generate import Generate, generate
from labkit.lab.cli.plan import plan
from labkit.lab.cli.pull import pull
from labkit.lab.cli.quantize import quantize
from labkit.lab.cli.run import run

app = typer.Typer(
    name="labkit",
    help="A lab for LLM inference: predict, measure and compare every optimization on your machine.",
    epilog="Begin with `labkit doctor`, then `labkit run 01`.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"labkit {labkit.__version__}")
        raise typer.Exit()


Version = typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")


@app.callback()
def _options(version: Annotated[bool, Version] = False) -> None:
    pass


for command in (doctor, pull, run, plan, quantize, distill):
    app.command()(command)
app.command(cls=Generate)(generate)
app.command(name="eval")(evaluate)
app.add_typer(bench, name="bench")
