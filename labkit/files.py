"""Files and folders: the cache folder, locks, and writing a file whole or not at all.

Every file is written under a temporary name, flushed to disk and then renamed. A process that is
killed at any line therefore leaves either the old file or the new one, never half of one.
Messages for people go to stderr, because stdout may carry one JSON object for a program.
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
    """Format bytes as download sizes are usually given: 1234567 -> '1.2 MB' (decimal)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def cache_dir() -> Path:
    """Return the cache folder: LABKIT_CACHE if set, else the platform's (not created here)."""
    chosen = os.environ.get("LABKIT_CACHE")
    if chosen:
        return Path(chosen).expanduser().resolve()
    from platformdirs import user_cache_path

    return user_cache_path("labkit", appauthor=False)


def data_path(name: str = "") -> Path:
    """Return a file of the project's data/ folder, in a checkout or an installation."""
    package = Path(__file__).resolve().parent
    checkout = package.parent / "data"
    inside = (package.parent / "pyproject.toml").is_file() and checkout.is_dir()
    folder = checkout if inside else package / "data"
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise BadRequest(
            f"{name!r} leaves the data folder; give a name inside it, such as 'assets.json'."
        )
    return path


@contextmanager
def lock(name: str):
    """Let one process at a time do the work called `name`; a second one says that it waits."""
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
        raise BadRequest(
            f"The cache folder {cache_dir()} cannot be written ({error.strerror}: {path}); "
            "set LABKIT_CACHE to a folder that can."
        ) from None
    try:
        yield
    finally:
        file_lock.release()


def flush(path: Path) -> None:
    """Write the file's buffers to disk; call it before a rename that must survive a power cut."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def save_tensors(path: str | Path, tensors: Mapping, about: Mapping[str, str] | None = None) -> int:
    """Write a safetensors file, whole or not at all; return its size in bytes.

    `about` goes into the file's header. An existing file stays until the new one is complete.
    Raises OSError if the file cannot be written.
    """
    from safetensors import SafetensorError  # imported here: loads torch
    from safetensors.torch import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, aside, dict(about or {}))
        default_permissions(aside)
        flush(aside)
        os.replace(aside, path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from None
    finally:
        aside.unlink(missing_ok=True)
    return path.stat().st_size


def default_permissions(path: Path) -> None:
    """Apply the default file permissions; safetensors creates files readable only by the owner."""
    mask = os.umask(0)  # the mask can only be read by setting it
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def publish(scratch: Path, target: Path) -> None:
    """Flush every file in `scratch`, then rename the folder to `target`, which is replaced."""
    for path in scratch.rglob("*"):
        if path.is_file():
            flush(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    old = scratch.with_name(f"{scratch.name}.old")
    if target.is_symlink() or target.is_file():
        target.unlink()  # a link's target is not ours to delete
    elif target.exists():  # moved aside first: under its name there is never half a folder
        os.replace(target, old)
    os.replace(scratch, target)
    shutil.rmtree(old, ignore_errors=True)


def read_json_object(path: str | Path) -> dict:
    """Return the JSON object in `path`; raises BadRequest with the file's name if it is not one."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as reason:  # JSON's and UTF-8's errors are ValueErrors
        raise BadRequest(f"{path} is not JSON ({reason}); fetch it again.") from reason
    if not isinstance(content, dict):
        raise BadRequest(f"{path} is not a JSON object; fetch it again.")
    return content
