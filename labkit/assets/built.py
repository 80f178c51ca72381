"""Folders that are built from an asset once, such as safetensors from GGUF: whole, or not there.

The sizes of what was built stand beside the folder. A file that was cut short or deleted since is noticed by its size on
the next use, and the folder is built again; one that was changed at the same size is not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from labkit.assets.listing import cache_dir
from labkit.assets.progress import say
from labkit.assets.store import lock, publish
from labkit.errors import BadRequest


def derived(name: str, build: Callable[[Path], None]) -> Path:
    """The folder cache/derived/<name>, made once by `build(folder)`; what it wrote appears whole or not at all.

    The name should say what it was made from and how (asset, dtype, version of the conversion).
    """
    if not name or PurePosixPath(name).name != name or name in {".", ".."}:
        raise BadRequest(f"{name!r} cannot name a derived folder; use letters, digits, dots and dashes.")
    target = cache_dir() / "derived" / name
    if _whole(target):
        return target
    with lock(f"derived-{name}"):
        if _whole(target):
            return target
        if target.is_dir():
            say(f"{target} is no longer what was built there; it is built again.")
        scratch = cache_dir() / "tmp" / f"derived-{name}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            build(scratch)
            target.parent.mkdir(parents=True, exist_ok=True)
            _sizes_file(target).write_text(json.dumps(_sizes(scratch)), encoding="utf-8")
            publish(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _sizes_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.sizes.json")


def _sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def _whole(folder: Path) -> bool:
    """Every file that was built has its size. A folder without a note of its sizes is taken as it is."""
    if not folder.is_dir():
        return False
    try:
        noted = json.loads(_sizes_file(folder).read_text(encoding="utf-8"))
        found = _sizes(folder)
        return all(found.get(name) == size for name, size in noted.items())
    except FileNotFoundError:
        return True
    except (ValueError, AttributeError):  # the note itself is damaged
        return False
