"""Start a notebook: the bootstrap cell, and what it prints.

`bootstrap()` is the text of the first cell of every notebook; `python -m labkit_course sync`
writes it. The cell installs labkit only if it is missing, from the checkout around the notebook
or from the project's address. It pins the installed torch, torchvision and numpy, because
a session breaks if they are replaced while they are loaded.

`begin()` prints machine, device, versions and the expected minutes. It raises BadRequest
if a loaded library has another version than the files on disk. Then restart the kernel.
"""

from __future__ import annotations

import json
import os
import re
import sys
from importlib import metadata
from pathlib import Path

from labkit.errors import BadRequest

WATCHED = ("torch", "torchvision", "numpy")
_ADDRESS = "https://github.com/labkit-lab/labkit"  # if the installation does not state one

_BOOTSTRAP = """\
# The same first cell in every notebook: installs labkit if it is missing.
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from tempfile import gettempdir

if not (find_spec("labkit") and find_spec("labkit_course")):
    folders = [Path.cwd(), *Path.cwd().parents]
    found = [str(p) for p in folders if (p / "labkit/__init__.py").exists()][:1]
    source = ["-e", *found] if found else ["git+@ADDRESS@"]
    sys.path[:0] = [*found, *(f"{f}/notebooks" for f in found)]
    keep = {"torch", "torchvision", "numpy"}  # as they are: they may be in use
    have = {d.metadata["Name"]: d.version for d in distributions()}
    pins = Path(gettempdir(), "labkit-constraints.txt")
    pins.write_text("".join(f"{n}=={v}\\n" for n, v in have.items() if n in keep))
    command = [sys.executable, "-m", "pip", "install", "-c", str(pins), *source]
    with Popen(command, stdout=PIPE, stderr=STDOUT, text=True) as pip:
        for line in pip.stdout:
            print(line, end="")
    assert pip.returncode == 0, "pip failed; its message above says why"
from labkit_course.start import begin

begin()
"""


def project_address() -> str:
    """Return the address in `[project.urls]` of pyproject.toml or of the installed metadata."""
    import tomllib

    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    if pyproject.exists():
        return tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["urls"]["Source"]
    try:
        lines = metadata.metadata("labkit").get_all("Project-URL") or ()
    except metadata.PackageNotFoundError:
        lines = ()
    return next((line.split(", ", 1)[1] for line in lines if line.startswith("Source,")), _ADDRESS)


def bootstrap() -> str:
    """Return the text of the bootstrap cell."""
    return _BOOTSTRAP.replace("@ADDRESS@", project_address()).rstrip("\n")


def begin() -> None:
    """Print machine, device, versions and minutes. Raises BadRequest if a restart is needed."""
    changed = [name for name in WATCHED if _differs(name)]
    if changed:
        raise BadRequest(
            f"{', '.join(changed)} changed on disk since this session loaded it; "
            "restart the kernel (Runtime > Restart) and run from the top"
        )
    from labkit.lab.measure.machine import machine

    here = machine()
    memory = f"{here.memory_bytes / 2**30:.0f} GiB"
    print(f"machine   {here.cpu}, {here.cores} cores, {memory}; {here.os}")
    print(f"device    {here.gpu or 'CPU only'}; {here.threads} threads")
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
    """Return the minutes in the notebook's title cell, if the notebook's file is known."""
    name = os.environ.get("LABKIT_NOTEBOOK") or os.environ.get("JPY_SESSION_NAME") or ""
    path = Path(name)
    if path.suffix == ".ipynb" and path.exists():
        cells = json.loads(path.read_text(encoding="utf-8")).get("cells", [])
        title = "".join(cells[0]["source"]) if cells else ""
        for line in title.splitlines():
            if "minutes" in line.lower():
                cell = [part for part in line.split("|") if part.strip()][-1]  # of a table's row
                return re.sub(r"[*_`]", "", cell).strip(" -")
    return "see the title above"
