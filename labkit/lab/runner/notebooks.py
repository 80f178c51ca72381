"""Find notebooks and read their parameters, before anything runs.

A misspelt parameter would run the whole lab with the defaults, and a notebook without a
`parameters` cell would ignore every parameter; both are errors here. So are the tags
`raises-exception` and `skip-execution`: a cell that shows an error catches it and prints it.
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
FORBIDDEN_TAGS = ("raises-exception", "skip-execution")


def checkout() -> Path:
    """Return the folder with `notebooks/`: the current one, one above it, or labkit's own."""
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).parents[3]):
        if any((folder / "notebooks").glob("[0-9][0-9]_*.ipynb")):
            return folder
    raise BadRequest(
        f"no notebooks/NN_name.ipynb in {here} or above it; run this in a checkout of labkit"
    )


def runs_folder() -> Path:
    """Return the folder of results: `LABKIT_RUNS`, or `runs/` in the checkout."""
    return Path(os.environ.get("LABKIT_RUNS") or checkout() / "runs").resolve()


def find_notebooks(names: Sequence[str] = (), folder: Path | None = None) -> list[Path]:
    """Return the notebooks that begin with one of `names` (default: all), in teaching order."""
    folder = Path(folder) if folder is not None else checkout() / "notebooks"
    known = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not known:
        raise BadRequest(f"no notebooks NN_name.ipynb in {folder}")
    chosen = set()
    for name in names:
        stem = Path(name).stem if name.endswith((".ipynb", ".py")) else name
        matching = [path for path in known if stem and path.stem.startswith(stem)]
        if not matching:
            stems = ", ".join(path.stem for path in known)
            raise BadRequest(f"no notebook begins with {name!r}; there are {stems}")
        chosen.update(matching)
    return [path for path in known if path in chosen or not names]


def tags(cell) -> list[str]:
    """Return a cell's tags."""
    return list(cell.metadata.get("tags", ()))


def code_cells(notebook) -> list[int]:
    """Return the indices of the author's code cells; messages count cells in this list from 1."""
    return [
        index
        for index, cell in enumerate(notebook.cells)
        if cell.cell_type == "code" and "injected-parameters" not in tags(cell)
    ]


def read_parameters(notebook, name: str) -> dict[str, object]:
    """Return names and defaults of the one cell tagged `parameters`: annotated constants."""
    cells = [cell for cell in notebook.cells if "parameters" in tags(cell)]
    if len(cells) != 1 or cells[0].cell_type != "code":
        raise BadRequest(f"{name} has {len(cells)} cells tagged 'parameters'; it needs one")
    try:
        lines = ast.parse(cells[0].source).body
        if not all(isinstance(line, ast.AnnAssign) for line in lines):
            raise ValueError
        return {line.target.id: ast.literal_eval(line.value) for line in lines}
    except (SyntaxError, ValueError, AttributeError):
        raise BadRequest(
            f"{name}: every line of its parameters cell must read `name: type = constant`, such "
            "as `threads: int = 0`"
        ) from None


def check_notebook(path: Path, parameters: Mapping[str, object]) -> nbformat.NotebookNode:
    """Read and check a notebook; return it without saved outputs."""
    try:
        notebook = nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError) as error:
        raise BadRequest(f"{path} is not a readable notebook: {error}") from None
    for number, index in enumerate(code_cells(notebook), 1):
        cell = notebook.cells[index]
        forbidden = [tag for tag in FORBIDDEN_TAGS if tag in tags(cell)]
        if forbidden:
            raise BadRequest(
                f"{path.name}: cell {number} is tagged {forbidden[0]!r}, which is not supported; "
                "catch the error in the cell and print it"
            )
        cell.outputs, cell.execution_count = [], None  # an old error is not an error of this run
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = nbformat.NotebookNode(kernelspec=kernel)
    defaults = read_parameters(notebook, path.name)
    for name, value in parameters.items():
        if name not in defaults:
            near = get_close_matches(name, defaults, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(defaults)}"
            raise BadRequest(f"{path.name} has no parameter {name!r}; {hint}")
        default, kind = defaults[name], type(defaults[name])
        allowed = (int, float) if kind is float else (kind,)
        if default is not None and type(value) not in allowed:
            raise BadRequest(
                f"{path.name}: {name} must be {kind.__name__} like its default {default!r}, "
                f"not {value!r}"
            )
    return notebook
