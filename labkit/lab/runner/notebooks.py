"""Find notebooks and read their parameters, before anything runs.

A misspelt parameter is an error, because the notebook would run with its defaults. A
notebook without a cell tagged `parameters` is an error, because it would ignore every
parameter. The tags `raises-exception` and `skip-execution` are errors, because they
hide failures. A cell that shows an error catches it and prints it.
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
    """Return the folder that contains `notebooks/`.

    The current folder is searched first, then those above it, then labkit's own
    checkout. Raises BadRequest if none contains notebooks.
    """
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).parents[3]):
        if any((folder / "notebooks").glob("[0-9][0-9]_*.ipynb")):
            return folder
    raise BadRequest(f"There is no notebooks/NN_name.ipynb in {here}; go to a checkout of labkit.")


def runs_folder() -> Path:
    """Return the folder of results: `LABKIT_RUNS`, or `runs/` in the checkout."""
    return Path(os.environ.get("LABKIT_RUNS") or checkout() / "runs").resolve()


def find_notebooks(names: Sequence[str] = (), folder: Path | None = None) -> list[Path]:
    """Return the notebooks whose names begin with one of `names` (default: all), sorted."""
    folder = Path(folder) if folder is not None else checkout() / "notebooks"
    known = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not known:
        raise BadRequest(f"There is no NN_name.ipynb in {folder}; give a folder of notebooks.")
    chosen = set()
    for name in names:
        stem = Path(name).stem if name.endswith((".ipynb", ".py")) else name
        matching = [path for path in known if stem and path.stem.startswith(stem)]
        if not matching:
            stems = ", ".join(path.stem for path in known)
            raise BadRequest(f"No notebook begins with {name!r}; choose from {stems}.")
        chosen.update(matching)
    return [path for path in known if path in chosen or not names]


def tags(cell) -> list[str]:
    """Return a cell's tags."""
    return list(cell.metadata.get("tags", ()))


def code_cells(notebook) -> list[int]:
    """Return the indices of the author's code cells, without injected parameters.

    Messages number these cells from 1.
    """
    return [
        index
        for index, cell in enumerate(notebook.cells)
        if cell.cell_type == "code" and "injected-parameters" not in tags(cell)
    ]


def read_parameters(notebook, name: str) -> dict[str, object]:
    """Return names and defaults from the cell tagged `parameters`.

    Raises BadRequest unless there is exactly one such cell and all its lines are
    annotated constants.
    """
    cells = [cell for cell in notebook.cells if "parameters" in tags(cell)]
    if len(cells) != 1 or cells[0].cell_type != "code":
        raise BadRequest(f"{name} has {len(cells)} cells tagged 'parameters'; tag one code cell.")
    try:
        lines = ast.parse(cells[0].source).body
        if not all(isinstance(line, ast.AnnAssign) for line in lines):
            raise ValueError
        return {line.target.id: ast.literal_eval(line.value) for line in lines}
    except (SyntaxError, ValueError, AttributeError):
        allowed = "write `name: type = constant` on every line, such as `threads: int = 0`"
        raise BadRequest(f"The parameters cell of {name} is not valid; {allowed}.") from None


def check_notebook(path: Path, parameters: Mapping[str, object]) -> nbformat.NotebookNode:
    """Read and check a notebook; return it without saved outputs."""
    try:
        notebook = nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError) as error:
        raise BadRequest(f"{path} is not a notebook: {error}") from None
    for number, index in enumerate(code_cells(notebook), 1):
        cell = notebook.cells[index]
        for tag in FORBIDDEN_TAGS:
            if tag in tags(cell):
                where = f"Cell {number} of {path.name} is tagged {tag!r}"
                raise BadRequest(f"{where}; remove the tag, catch the error and print it.")
        cell.outputs, cell.execution_count = [], None  # an old error is not an error of this run
    for cell in notebook.cells:
        cell.metadata.setdefault("tags", [])  # papermill reads them
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel, "papermill": {}})
    defaults = read_parameters(notebook, path.name)
    for name, value in parameters.items():
        if name not in defaults:
            near = get_close_matches(name, defaults, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(defaults)}"
            raise BadRequest(f"{path.name} has no parameter {name!r}; {hint}.")
        default, kind = defaults[name], type(defaults[name])
        allowed = (int, float) if kind is float else (kind,)
        if default is not None and type(value) not in allowed:
            like = f"give a value of type {kind.__name__}, such as {default!r}"
            raise BadRequest(f"Parameter {name} of {path.name} is {value!r}; {like}.")
    return notebook
