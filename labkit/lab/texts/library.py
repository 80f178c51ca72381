"""Read Python's standard library as text and split it into three parts.

A file belongs to `evaluation` (10 %), `calibration` (10 %) or `training` (80 %). A hash
of its name decides, so the split is the same on every machine and for every seed.

Code is the source of the files. Prose is their docstrings, and pydoc's topics with one
document per topic. Some files share lines with evaluation files, such as a licence
header or a copied function. Runs of such lines are removed from the other two parts.

The library differs between Python versions.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from labkit.errors import BadRequest

ROOT = Path(sysconfig.get_path("stdlib"))
RUN = 6  # number of consecutive equal lines that count as shared text
# Folders to leave out: installed packages, tests, generated tables, vendored code.
_SKIP = set(
    "__pycache__ config dist-packages encodings ensurepip idlelib lib2to3 pydoc_data site-packages "
    "test tests turtledemo _vendor".split()
)


@dataclass(frozen=True)
class Document:
    """A text with a name."""

    name: str
    text: str


def part_of(name: str) -> str:
    """Return the part that a document belongs to. Only its name decides."""
    share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
    return "evaluation" if share < 0.1 else "calibration" if share < 0.2 else "training"


@cache
def names(kind: str, part: str) -> tuple[str, ...]:
    """Return the sorted names of the documents of a part.

    `library/…` is a file and `topics/…` is a topic of pydoc. `kind` is "code" or
    "prose". Raises BadRequest for any other kind.
    """
    if kind not in ("code", "prose"):
        raise BadRequest(f"There is no text of kind {kind!r}; choose 'code' or 'prose'.")
    topics = _topics() if kind == "prose" else ()
    every = [f"library/{path}" for path in _files()] + [f"topics/{topic}" for topic in topics]
    return tuple(name for name in sorted(every) if part_of(name) == part)


def documents(kind: str, part: str, seed: int | None = None) -> Iterator[Document]:
    """Yield the documents of a part that are not empty.

    Lines that they share with evaluation documents are left out. The documents come in
    sorted order, or in the shuffled order of a seed. `part` is "evaluation",
    "calibration" or "training". Raises BadRequest if `kind` is not "code" or "prose".
    """
    order = list(names(kind, part))
    if seed is not None:
        Random(seed).shuffle(order)
    for name in order:
        text = _raw(kind, name)
        if part != "evaluation":
            text = without_runs(text, _evaluation_runs())
        if text.strip():
            yield Document(name, text)


def without_runs(text: str, forbidden: set[int]) -> str:
    """Return the text without the lines of every run whose hash is in `forbidden`."""
    lines = text.split("\n")
    # Blank lines do not break a run.
    filled = [number for number, line in enumerate(lines) if line.strip()]
    drop: set[int] = set()
    for start, run in enumerate(_runs(text)):
        if run in forbidden:
            drop.update(filled[start : start + RUN])
    return "\n".join(line for number, line in enumerate(lines) if number not in drop)


def _runs(text: str) -> Iterator[int]:
    """Yield a hash of each RUN consecutive lines, without blank lines and indents."""
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    return (hash(tuple(lines[start : start + RUN])) for start in range(len(lines) - RUN + 1))


@cache
def _evaluation_runs() -> set[int]:
    runs: set[int] = set()
    for kind in ("code", "prose"):
        for name in names(kind, "evaluation"):
            runs.update(_runs(_raw(kind, name)))
    return runs


def _raw(kind: str, name: str) -> str:
    """Return the whole text of a document, or "" if its file cannot be read."""
    place, _, rest = name.partition("/")
    if place == "topics":
        return _topics()[rest].strip() + "\n"
    try:
        with tokenize.open(ROOT / rest) as file:  # reads the encoding from the file
            source = file.read()
        return source if kind == "code" else _docstrings(source)
    except (SyntaxError, ValueError, OSError):
        return ""


@cache
def _files() -> tuple[str, ...]:
    paths: list[str] = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if f not in _SKIP and not f.startswith("config-")]
        place = Path(folder).relative_to(ROOT)
        paths += [(place / file).as_posix() for file in files if file.endswith(".py")]
    if not paths:
        raise BadRequest(f"Python's library has no source in {ROOT}; use another Python.")
    # The files _sysconfigdata… describe how this Python was built.
    return tuple(path for path in paths if "_sysconfigdata" not in path)


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some Linux distributions do not install the topics
        return {}
    return topics


def _docstrings(source: str) -> str:
    """Join the docstrings of at least 120 characters. Shorter ones are not prose."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, holders))
    return "\n\n".join(text for text in map(ast.get_docstring, nodes) if text and len(text) >= 120)
