"""The cache folder, locks, and files that are written completely or not at all.

Every file is written under a temporary name, flushed to disk and then renamed. If a
process is killed at any line, either the old file or the new one remains, never a part
of one. Messages for people go to stderr, because stdout may carry a JSON object for a
program.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

from labkit.errors import BadRequest


def say(text: str) -> None:
    """Print a message for a person to stderr."""
    print(text, file=sys.stderr, flush=True)


def size(num_bytes: float) -> str:
    """Format bytes in decimal units, as download sizes usually are: 1234567 -> '1.2 MB'."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def cache_dir() -> Path:
    """Return the cache folder without creating it.

    This is LABKIT_CACHE if it is set, else the usual cache folder of the platform.
    """
    if chosen := os.environ.get("LABKIT_CACHE"):
        return Path(chosen).expanduser().resolve()
    from platformdirs import user_cache_path

    return user_cache_path("labkit", appauthor=False)


def data_path(name: str = "") -> Path:
    """Return the path of a file in the project's data/ folder.

    The folder is found in a checkout and in an installed package. Raises BadRequest if
    the path lies outside it.
    """
    package = Path(__file__).resolve().parent
    checkout = package.parent / "data"
    in_checkout = (package.parent / "pyproject.toml").is_file() and checkout.is_dir()
    folder = (checkout if in_checkout else package / "data").resolve()
    path = (folder / name).resolve()
    if not path.is_relative_to(folder):
        raise BadRequest(f"{name!r} is outside the data folder; give a name inside it.")
    return path


@contextmanager
def lock(name: str):
    """Let only one process at a time do the work called `name`.

    Another process prints a message and waits. Raises BadRequest if the cache folder
    cannot be written.
    """
    from filelock import FileLock, Timeout  # imported here: slower to import than all of labkit

    path = cache_dir() / "locks" / f"{name}.lock"
    file_lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file_lock.acquire(timeout=0.2)
    except Timeout:
        say(f"Another process is preparing {name}; waiting for it.")
        file_lock.acquire()
    except OSError as error:
        reason = f"{path} cannot be written ({error.strerror})"
        raise BadRequest(f"{reason}; set LABKIT_CACHE to a folder that you can write.") from None
    try:
        yield
    finally:
        file_lock.release()


def flush(path: Path) -> None:
    """Write the buffers of a file to disk.

    Call it before a rename that must survive a power failure.
    """
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def save_tensors(path: str | Path, tensors: Mapping, about: Mapping[str, str] | None = None) -> int:
    """Write a safetensors file and return its size in bytes.

    An existing file stays until the new one is complete. `about` goes into the header.
    Raises OSError if the file cannot be written.
    """
    from safetensors import SafetensorError  # imported here: loads torch
    from safetensors.torch import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, part, dict(about or {}))
        mask = os.umask(0)  # the only way to read the mask is to set it
        os.umask(mask)
        part.chmod(0o666 & ~mask)  # safetensors lets only the owner read its files
        flush(part)
        os.replace(part, path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from None
    finally:
        part.unlink(missing_ok=True)
    return path.stat().st_size


def publish(scratch: Path, target: Path) -> None:
    """Flush every file in `scratch` and rename the folder to `target`.

    This replaces an existing file, link or folder `target`.
    """
    for path in filter(Path.is_file, scratch.rglob("*")):
        flush(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    old = scratch.with_name(f"{scratch.name}.old")
    if target.is_symlink() or target.is_file():
        target.unlink()  # the file behind a link is not ours to delete
    elif target.exists():  # move it away first: then `target` is never an incomplete folder
        os.replace(target, old)
    os.replace(scratch, target)
    shutil.rmtree(old, ignore_errors=True)


def read_json_object(path: str | Path) -> dict:
    """Return the JSON object in a file.

    Raises BadRequest with the file's name if the file contains anything else.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as reason:  # JSON's and UTF-8's errors are ValueErrors
        raise BadRequest(f"{path} is not JSON ({reason}); fetch it again.") from reason
    if not isinstance(content, dict):
        raise BadRequest(f"{path} is not a JSON object; fetch it again.")
    return content
