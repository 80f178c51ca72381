"""`labkit run`."""

from __future__ import annotations

import ast
from typing import Annotated

from typer import Argument, Option

from labkit.errors import BadRequest
from labkit.lab.cli.answer import Json, answer


def run(
    notebooks: Annotated[list[str] | None, Argument(help="Their names begin so: 01.")] = None,
    scale: Annotated[str, Option(help="quick, standard or full.")] = "quick",
    model: Annotated[str | None, Option(help="The parameter `model`.")] = None,
    device: Annotated[str | None, Option(help="The parameter `device`.")] = None,
    threads: Annotated[int | None, Option(min=1, help="The parameter `threads`.")] = None,
    parameter: Annotated[list[str] | None, Option("-p", "--parameter", help="NAME=VALUE.")] = None,
    time_limit: Annotated[float, Option(min=1, help="Seconds per notebook.")] = 3600.0,
    as_json: Json = False,
) -> int:
    """Execute notebooks and write their figures and results to runs/.

    Exits 1 if a notebook fails.

    \b
    Example:  labkit run 01
              labkit run 01 02 --scale standard --threads 2
    """
    from labkit.lab.runner import run_notebooks
    from labkit.lab.runner.limits import Limits

    own = {"model": model, "device": device, "threads": threads}
    parameters = {name: value for name, value in own.items() if value is not None}
    parameters |= dict(map(_parameter, parameter or ()))
    limits = Limits(seconds=time_limit)
    report = run_notebooks(notebooks or (), scale, parameters=parameters, limits=limits)
    lines = [
        f"{'ok    ' if one.ok else 'FAILED'}  {one.name}  {one.seconds:.1f} s"
        for one in report.notebooks
    ]
    lines += [f"{one.name}: {one.error}" for one in report.notebooks if one.error]
    answer(report.as_dict(), as_json, "\n".join(lines))
    return 0 if report.ok else 1


def _parameter(text: str) -> tuple[str, object]:
    """Parse NAME=VALUE; a value that is not a Python literal is text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise BadRequest(f"--parameter is {text!r}; give NAME=VALUE, such as repeats=3")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
