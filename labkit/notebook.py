"""What every notebook begins with: the one bootstrap cell, and what it prints.

`bootstrap()` is the text of that cell, written into all notebooks by `python -m labkit.runner sync`. It
installs labkit only where it is missing, from the checkout that the notebook lies in or from the project's
address. The installed torch, torchvision and numpy are pinned while it does so: replacing one on disk
while another version is loaded breaks the session. pip is heard, and runs before torch is imported.

`begin()` then prints machine, device, versions and the expected minutes, and refuses to go on where a
library's loaded version is not the one on disk ("restart").
"""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata
from pathlib import Path

from labkit.errors import BadRequest

WATCHED = ("torch", "torchvision", "numpy")
_ADDRESS = "https://github.com/labkit-lab/labkit"  # of an installation whose metadata name none

_BOOTSTRAP = """\
# The same first cell in every notebook: installs labkit where it is missing.
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from tempfile import gettempdir

if find_spec("labkit") is None:
    folders = [Path.cwd(), *Path.cwd().parents]
    found = [str(p) for p in folders if (p / "labkit/__init__.py").exists()][:1]
    source = ["-e", *found] if found else ["git+@ADDRESS@"]
    sys.path[:0] = found
    keep = {"torch", "torchvision", "numpy"}  # as they are: they may be in use
    have = {d.metadata["Name"]: d.version for d in distributions()}
    pins = Path(gettempdir(), "labkit-constraints.txt")
    pins.write_text("".join(f"{n}=={v}\\n" for n, v in have.items() if n in keep))
    command = [sys.executable, "-m", "pip", "install", "-c", str(pins), *source]
    with Popen(command, stdout=PIPE, stderr=STDOUT, text=True) as pip:
        for line in pip.stdout:
            print(line, end="")
    assert pip.returncode == 0, "pip failed; its message above says why"
from labkit.notebook import begin

begin()
"""


def project_address() -> str:
    """The address in `[project.urls]`, from pyproject.toml in a checkout, else from the installed metadata."""
    import tomllib

    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    if pyproject.exists():
        return tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["urls"]["Source"]
    try:
        lines = metadata.metadata("labkit").get_all("Project-URL") or ()
    except metadata.PackageNotFoundError:
        lines = ()
    return next((line.split(", ", 1)[1] for line in lines if line.startswith("Source,")), _ADDRESS)


def bootstrap() -> str:
    """The text of the bootstrap cell."""
    return _BOOTSTRAP.replace("@ADDRESS@", project_address()).rstrip("\n")


def begin() -> None:
    """Print machine, device, versions and minutes; raise where a loaded library is not the one on disk."""
    changed = [name for name in WATCHED if _differs(name)]
    if changed:
        raise BadRequest(
            f"{', '.join(changed)} on disk is not the version that this session has loaded; restart the kernel"
            " (Runtime > Restart) and run from the top"
        )
    from labkit.measure.machine import machine

    here = machine()
    device = here.gpu or "CPU only"
    print(f"machine   {here.cpu}, {here.cores} cores, {here.memory_bytes / 2**30:.0f} GiB; {here.os}")
    print(f"device    {device}; {here.threads} threads")
    print("versions  " + ", ".join(f"{name} {version}" for name, version in here.versions.items()))
    print(f"minutes   {_minutes()}")


def _differs(name: str) -> bool:
    loaded = sys.modules.get(name)
    if loaded is None:
        return False
    try:
        return getattr(loaded, "__version__", None) != metadata.version(name)
    except metadata.PackageNotFoundError:
        return False


def _minutes() -> str:
    """The line of the notebook's title cell that speaks of minutes, where the notebook's file is known."""
    name = os.environ.get("LABKIT_NOTEBOOK") or os.environ.get("JPY_SESSION_NAME") or ""
    path = Path(name)
    if path.suffix == ".ipynb" and path.exists():
        import json

        cells = json.loads(path.read_text(encoding="utf-8")).get("cells", [])
        title = "".join(cells[0]["source"]) if cells else ""
        lines = [line for line in title.splitlines() if "minutes" in line.lower()]
        if lines:
            cell = [part for part in lines[0].split("|") if part.strip()][-1]  # of a table row, its last
            return re.sub(r"[*_`]", "", cell).strip(" -")
    return "see the title above"
