"""A folder for rooms without a network: the wheels of the tested set, for `make lab WHEELS=FOLDER`.

pip resolves and downloads what labkit's own metadata asks for, at the versions of constraints.txt, for
this machine's Python and platform (say so: a folder made on Linux does not serve Windows).
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from labkit.assets.listing import data_path
from labkit.assets.progress import say
from labkit.assets.wheels import NotAvailable
from labkit.errors import BadRequest

BUILD = ("setuptools>=77", "wheel", "pip")  # building the checkout itself needs these


def requirements(extras: tuple[str, ...] = ("lab", "test")) -> list[str]:
    """What `pip install labkit[lab,test]` would ask for, without labkit itself."""
    kept = []
    for line in metadata.requires("labkit") or ():
        wanted = re.search(r"""extra\s*==\s*["']([\w-]+)["']""", line)
        name = line.split(";")[0].strip()
        if (wanted is None or wanted[1] in extras) and not name.startswith("labkit"):
            kept.append(name)
    return kept


def constraints_file() -> Path:
    path = data_path().parent / "constraints.txt"
    if not path.is_file():
        raise BadRequest(
            "The tested set of packages is constraints.txt in a checkout, and this is an installation; "
            "run `labkit pull --save FOLDER` from a checkout."
        )
    return path


def save_environment(folder: Path) -> None:
    """Every wheel that `make lab` installs, into `folder`; pip skips those that are there already."""
    constraints = constraints_file()
    folder.mkdir(parents=True, exist_ok=True)
    platform = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {sys.platform}"
    say(
        f"Saving the tested packages for {platform} to {folder}: 0.4 GB with PyTorch's CPU build, 4 GB with CUDA "
        f"(pip's settings decide: PIP_EXTRA_INDEX_URL can name the index of the CPU build)."
    )
    command = [sys.executable, "-m", "pip", "download", "--only-binary", ":all:", "--disable-pip-version-check"]
    command += ["--dest", str(folder), "--constraint", str(constraints), *BUILD, *requirements()]
    if subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL).returncode:
        raise NotAvailable(
            f"pip could not download the tested packages to {folder} (its messages are above); run it again with a "
            f"network: what is there already is kept."
        )
