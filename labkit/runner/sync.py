"""Keeping each NN_name.ipynb equal to its NN_name.py: the script is what people edit and review.

    python -m labkit.runner sync             cells from the .py; outputs stay where a cell's source is unchanged
    python -m labkit.runner sync --outputs   the same, with outputs from runs/quick/
    python -m labkit.runner sync --check     write nothing; exit 1 if a pair differs

File times are never asked: in a fresh clone they say nothing. Written notebooks hold no widget state, no
papermill marks and no host's name for its kernel, and their cell ids count up, so that a diff shows content.
"""

from __future__ import annotations

import re
from pathlib import Path

import jupytext
import nbformat

from labkit.errors import BadRequest
from labkit.notebook import bootstrap, project_address

_BOOTSTRAP_CELL = re.compile(r'(^# %% tags=\["bootstrap"\]\n).*?(?=^# %%|\Z)', re.MULTILINE | re.DOTALL)
_BADGES = re.compile(r"(^# <!-- badges -->\n).*?(^# <!-- /badges -->)", re.MULTILINE | re.DOTALL)
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def badges(stem: str) -> str:
    """One line for the title cell: open in Colab, and the script that is the source."""
    address = project_address().rstrip("/")
    image = "https://colab.research.google.com/assets/colab-badge.svg"
    target = address.replace("https://github.com/", "https://colab.research.google.com/github/")
    colab = f"[![Open in Colab]({image})]({target}/blob/main/notebooks/{stem}.ipynb)"
    return f"{colab} [Source]({address}/blob/main/notebooks/{stem}.py)"


def read_script(path: Path) -> nbformat.NotebookNode:
    """The percent script as a notebook."""
    return jupytext.read(path, fmt="py:percent")


def cells_of(notebook) -> list[tuple[str, str, tuple[str, ...]]]:
    """What must be equal in a pair: kind, source and tags of each cell."""
    return [(cell.cell_type, cell.source, tuple(cell.metadata.get("tags", ()))) for cell in notebook.cells]


def differs(script: Path) -> bool:
    """Whether the pair of `script` is missing or says something else."""
    pair = script.with_suffix(".ipynb")
    if not pair.exists():
        return True
    return cells_of(read_script(script)) != cells_of(nbformat.read(pair, as_version=4))


def sync(folder: Path, outputs: Path | None = None) -> list[Path]:
    """Write bootstrap cell and badges into every script of `folder`, then every notebook; return what changed."""
    scripts = sorted(folder.glob("[0-9][0-9]_*.py"))
    if not scripts:
        raise BadRequest(f"no scripts NN_name.py in {folder}")
    changed = []
    for script in scripts:
        old = script.read_text(encoding="utf-8")
        new = _BOOTSTRAP_CELL.sub(lambda match: f"{match[1]}{bootstrap()}\n\n", old)
        new = _BADGES.sub(rf"\g<1># {badges(script.stem)}\n\g<2>", new)
        if new != old:
            script.write_text(new, encoding="utf-8", newline="\n")
            changed.append(script)
        notebook = read_script(script)
        pair = script.with_suffix(".ipynb")
        ran = (outputs / pair.name) if outputs is not None else pair
        text = nbformat.writes(_clean(notebook, nbformat.read(ran, as_version=4) if ran.exists() else None)) + "\n"
        if not pair.exists() or pair.read_text(encoding="utf-8") != text:
            pair.write_text(text, encoding="utf-8", newline="\n")
            changed.append(pair)
    return changed


def _clean(notebook, ran) -> nbformat.NotebookNode:
    """A notebook of `notebook`'s cells with the outputs that `ran` holds for equal sources."""
    known: dict[str, list] = {}
    for cell in ran.cells if ran else ():
        if cell.cell_type == "code":
            known.setdefault(cell.source, []).append(cell)
    cells, count = [], 0
    for number, cell in enumerate(notebook.cells):
        new = nbformat.NotebookNode(
            cell_type=cell.cell_type, id=f"cell-{number:02}", source=cell.source, metadata=nbformat.NotebookNode()
        )
        if cell.metadata.get("tags"):
            new.metadata.tags = list(cell.metadata.tags)
        if cell.cell_type == "code":
            old = known[cell.source].pop(0) if known.get(cell.source) else None
            new.outputs = [output for output in map(_still, old.outputs if old else ()) if output]
            count += bool(cell.source.strip())
            new.execution_count = count if old and old.execution_count else None
        cells.append(new)
    return nbformat.NotebookNode(
        cells=cells, nbformat=4, nbformat_minor=5,
        metadata=nbformat.NotebookNode(
            kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
            language_info={"name": "python"},
        ),
    )  # fmt: skip


def _still(output):
    """The output without a view of a widget that no longer lives; None where nothing else was in it."""
    if "data" in output:
        if WIDGET_VIEW in output.data:
            return None
        if "execution_count" in output:
            output.execution_count = None
    return output
