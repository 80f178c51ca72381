"""Finding notebooks and reading what they promise, before anything runs.

A misspelt parameter silently runs the whole lab with the defaults, and a notebook without a `parameters`
cell ignores every parameter: papermill warns and exits 0. Here both are refused, in one sentence.
`raises-exception` and `skip-execution` are refused too: papermill ignores the first and silently skips by
the second; a cell that shows an error catches it and prints it.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import nbformat

from labkit.errors import BadRequest

SCALES = ("quick", "standard", "full")
REFUSED_TAGS = ("raises-exception", "skip-execution")


def checkout() -> Path:
    """The folder that holds `notebooks/`: the current one, one above it, or where labkit lies."""
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).parents[2]):
        if any((folder / "notebooks").glob("[0-9][0-9]_*.ipynb")):
            return folder
    raise BadRequest(f"no notebooks/NN_name.ipynb in {here} or above it; run this in a checkout of labkit")


def runs_folder() -> Path:
    """Where results go: `LABKIT_RUNS`, or `runs/` in the checkout."""
    return Path(os.environ.get("LABKIT_RUNS") or checkout() / "runs").resolve()


def find_notebooks(names: Sequence[str] = (), folder: Path | None = None) -> list[Path]:
    """Notebooks whose name begins with one of `names` (all without names), in teaching order."""
    folder = Path(folder) if folder is not None else checkout() / "notebooks"
    known = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not known:
        raise BadRequest(f"no notebooks NN_name.ipynb in {folder}")
    chosen = set()
    for name in names:
        stem = Path(name).stem if name.endswith((".ipynb", ".py")) else name
        matching = [path for path in known if stem and path.stem.startswith(stem)]
        if not matching:
            raise BadRequest(f"no notebook begins with {name!r}; there are {', '.join(path.stem for path in known)}")
        chosen.update(matching)
    return [path for path in known if path in chosen or not names]


def tags(cell) -> list[str]:
    """A cell's tags."""
    return list(cell.metadata.get("tags", ()))


def code_cells(notebook) -> list[int]:
    """Indices of the code cells that the author wrote; cell 1 of a message is the first of them."""
    cells = enumerate(notebook.cells)
    return [index for index, cell in cells if cell.cell_type == "code" and "injected-parameters" not in tags(cell)]


def read_parameters(notebook, name: str) -> dict[str, object]:
    """Names and defaults in the one cell tagged `parameters`: annotated constants."""
    cells = [cell for cell in notebook.cells if "parameters" in tags(cell)]
    if len(cells) != 1 or cells[0].cell_type != "code":
        raise BadRequest(f"{name} has {len(cells)} cells tagged 'parameters'; it needs one code cell with that tag")
    defaults = {}
    try:
        for line in ast.parse(cells[0].source).body:
            if not isinstance(line, ast.AnnAssign):
                raise ValueError
            defaults[line.target.id] = ast.literal_eval(line.value)
    except (SyntaxError, ValueError, AttributeError):
        raise BadRequest(
            f"{name}: every line of its parameters cell must read `name: type = constant`, as `threads: int = 0` does"
        ) from None
    return defaults


def check_notebook(path: Path, parameters: Mapping[str, object]) -> nbformat.NotebookNode:
    """Read a notebook, refuse what could not run strictly, and return it without saved outputs."""
    try:
        notebook = nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError) as error:
        raise BadRequest(f"{path} is not a readable notebook: {error}") from None
    for number, index in enumerate(code_cells(notebook), 1):
        cell = notebook.cells[index]
        refused = [tag for tag in REFUSED_TAGS if tag in tags(cell)]
        if refused:
            raise BadRequest(
                f"{path.name}: cell {number} is tagged {refused[0]!r}, which papermill does not honour reliably;"
                " catch the error in the cell and print it"
            )
        cell.outputs, cell.execution_count = [], None  # an error from an old run is not an error of this one
    notebook.metadata = nbformat.NotebookNode(
        kernelspec={"name": "python3", "display_name": "Python 3", "language": "python"}
    )
    defaults = read_parameters(notebook, path.name)
    for name, value in parameters.items():
        if name not in defaults:
            near = get_close_matches(name, defaults, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(defaults)}"
            raise BadRequest(f"{path.name} has no parameter {name!r}{hint}")
        wanted = type(defaults[name])
        if defaults[name] is not None and type(value) is not wanted and not (wanted is float and type(value) is int):
            raise BadRequest(
                f"{path.name}: {name} must be {wanted.__name__} as its default {defaults[name]!r} is, not {value!r}"
            )
    return notebook
