"""Keep each NN_name.ipynb equal to its scripts/NN_name.py, which people edit and review.

    python -m labkit_course sync             cells from the script; outputs of unchanged cells stay
    python -m labkit_course sync --outputs   the same, with outputs from runs/quick/
    python -m labkit_course sync --check     write nothing; exit 1 if a pair differs

File times are not used, because a fresh clone changes them. Written notebooks contain no
widget state and no names of the machine. Their cell ids count up, so a diff shows only content.
"""

from __future__ import annotations

import re
from pathlib import Path

import jupytext
import nbformat
from jupytext.combine import combine_inputs_with_outputs
from nbformat import NotebookNode

from labkit.errors import BadRequest
from labkit_course.start import bootstrap, project_address

_BOOTSTRAP_CELL = re.compile(
    r'(^# %% tags=\["bootstrap"\]\n).*?(?=^# %%|\Z)', re.MULTILINE | re.DOTALL
)
_BADGES = re.compile(r"(^# <!-- badges -->\n).*?(^# <!-- /badges -->)", re.MULTILINE | re.DOTALL)
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def badges(stem: str) -> str:
    """Return the line of the title cell with links to Colab and to the script."""
    address = project_address().rstrip("/")
    image = "https://colab.research.google.com/assets/colab-badge.svg"
    target = address.replace("https://github.com/", "https://colab.research.google.com/github/")
    colab = f"[![Open in Colab]({image})]({target}/blob/main/notebooks/{stem}.ipynb)"
    return f"{colab} [Source]({address}/blob/main/notebooks/scripts/{stem}.py)"


def scripts_of(folder: Path) -> list[Path]:
    """Return the scripts of a notebook folder, in teaching order."""
    return sorted((folder / "scripts").glob("[0-9][0-9]_*.py"))


def read_script(path: Path) -> NotebookNode:
    """Return the percent script as a notebook."""
    return jupytext.read(path, fmt="py:percent")


def cells_of(notebook) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return type, source and tags of each cell, which must be equal in a pair."""
    return [
        (cell.cell_type, cell.source, tuple(cell.metadata.get("tags", ())))
        for cell in notebook.cells
    ]


def notebook_of(script: Path) -> Path:
    """Return the notebook of scripts/NN_name.py: NN_name.ipynb one folder up."""
    return script.parents[1] / f"{script.stem}.ipynb"


def differs(script: Path) -> bool:
    """Return True if the notebook of `script` is missing or has other cells."""
    pair = notebook_of(script)
    if not pair.exists():
        return True
    return cells_of(read_script(script)) != cells_of(nbformat.read(pair, as_version=4))


def sync(folder: Path, outputs: Path | None = None) -> list[Path]:
    """Write bootstrap cell and badges into every script, then every notebook of `folder`.

    `outputs` is a folder of executed notebooks. A notebook that is not in it keeps its own
    outputs. Returns the changed files.
    """
    scripts = scripts_of(folder)
    if not scripts:
        raise BadRequest(
            f"There are no NN_name.py in {folder / 'scripts'}; give the folder `notebooks`."
        )
    changed = []
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        text = _BOOTSTRAP_CELL.sub(lambda match: f"{match[1]}{bootstrap()}\n\n", text)
        text = _BADGES.sub(rf"\g<1># {badges(script.stem)}\n\g<2>", text)
        changed += _write(script, text)
        pair = notebook_of(script)
        ran_at = [place / pair.name for place in (outputs, pair.parent) if place]
        executed = next((path for path in ran_at if path.exists()), None)
        ran = nbformat.read(executed, as_version=4) if executed else None
        changed += _write(pair, nbformat.writes(_with_outputs(read_script(script), ran)) + "\n")
    return changed


def _write(path: Path, text: str) -> list[Path]:
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return []
    path.write_text(text, encoding="utf-8", newline="\n")
    return [path]


def _with_outputs(notebook, ran) -> NotebookNode:
    """Return `notebook` with the outputs in `ran` of cells with equal source."""
    cells, count = notebook.cells, 0
    if ran:
        cells = combine_inputs_with_outputs(notebook, ran).cells
    # jupytext also gives a changed cell the outputs of the cell in its place; drop those.
    sources = {cell.source for cell in ran.cells} if ran else set()
    for number, (cell, source) in enumerate(zip(cells, notebook.cells)):
        tags = source.metadata.get("tags")
        cell.id = f"cell-{number:02}"
        cell.metadata = NotebookNode({"tags": list(tags)} if tags else {})
        if cell.cell_type == "code":
            count += bool(cell.source.strip())
            executed = cell.source in sources and cell.execution_count
            cell.outputs = _static(cell.outputs) if cell.source in sources else []
            cell.execution_count = count if executed else None
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = NotebookNode(kernelspec=kernel, language_info={"name": "python"})
    return NotebookNode(cells=cells, nbformat=4, nbformat_minor=5, metadata=about)


def _static(outputs) -> list[NotebookNode]:
    """Return the outputs without views of widgets and without counts."""
    outputs = [output for output in outputs if WIDGET_VIEW not in output.get("data", {})]
    for output in outputs:
        if "execution_count" in output:
            output.execution_count = None
    return outputs
