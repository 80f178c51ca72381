"""Text that every Python has: its standard library, split once into three parts.

A file belongs to `evaluation` (10 %), `calibration` (10 %) or `training` (80 %) by a
hash of its name alone, so the split is the same on every machine and for every seed.
Code is the source; prose is pydoc's topics (one document each) and the docstrings of
the files. Runs of lines that an evaluation file also contains (a licence header, a
copied function) are cut out of the other parts.

The library differs between Python versions; record `revision()` with every result.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from labkit.errors import BadRequest

PARTS = ("evaluation", "calibration", "training")
RUN = 6  # lines in a row that count as the same text
# Excluded: installed packages, tests, generated tables, vendored code.
_SKIP = set(
    "__pycache__ config dist-packages encodings ensurepip idlelib lib2to3 pydoc_data site-packages "
    "test tests turtledemo _vendor".split()
)


@dataclass(frozen=True)
class Document:
    name: str
    text: str


def revision() -> str:
    return f"Python {platform.python_version()} standard library"


def part_of(name: str) -> str:
    """Return the part of a document; only its name decides."""
    share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
    return "evaluation" if share < 0.1 else "calibration" if share < 0.2 else "training"


@cache
def names(kind: str, part: str) -> tuple[str, ...]:
    """Return the names of a part's documents.

    `library/…` are files, and `topics/…` are pydoc's topics."""
    found = ["library/" + path for path in _files()]
    if kind == "prose":
        found += ["topics/" + topic for topic in _topics()]
    elif kind != "code":
        raise BadRequest(f"There is no text of kind {kind!r}; choose 'code' or 'prose'.")
    return tuple(name for name in sorted(found) if part_of(name) == part)


def document(kind: str, name: str) -> Document:
    """Return one document, without lines that evaluation documents also have."""
    text = _raw(kind, name)
    if part_of(name) != "evaluation":
        text = without_runs(text, _evaluation_runs())
    return Document(name, text)


def without_runs(text: str, forbidden: set[int]) -> str:
    """Return the text without the lines of every run of RUN lines in `forbidden`."""
    lines = text.split("\n")
    # Blank lines do not break a run.
    kept = [number for number, line in enumerate(lines) if line.strip()]
    drop: set[int] = set()
    for start, run in enumerate(_runs(text)):
        if run in forbidden:
            drop.update(kept[start : start + RUN])
    return "\n".join(line for number, line in enumerate(lines) if number not in drop)


def _runs(text: str) -> Iterator[int]:
    lines = [stripped for line in text.split("\n") if (stripped := line.strip())]
    for start in range(len(lines) - RUN + 1):
        yield hash(tuple(lines[start : start + RUN]))


@cache
def _evaluation_runs() -> set[int]:
    runs: set[int] = set()
    for name in names("prose", "evaluation"):  # the files, and the topics
        runs.update(_runs(_raw("prose", name)))
        if name.startswith("library/"):
            runs.update(_runs(_raw("code", name)))
    return runs


def _raw(kind: str, name: str) -> str:
    place, _, rest = name.partition("/")
    if place == "topics":
        return _topics()[rest].strip() + "\n"
    source = _read(_root() / rest)
    return source if kind == "code" else _docstrings(source)


@cache
def _root() -> Path:
    root = Path(sysconfig.get_path("stdlib"))
    if not (root / "json" / "decoder.py").is_file():
        raise BadRequest(
            f"This Python has no library source in {root}; use one from python.org, from conda "
            "or of the system."
        )
    return root


@cache
def _files() -> tuple[str, ...]:
    root, paths = _root(), []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in _SKIP and not f.startswith("config-")]
        place = Path(folder).relative_to(root)
        paths += [(place / file).as_posix() for file in files if file.endswith(".py")]
    # _sysconfigdata… describes this build, not Python.
    return tuple(sorted(path for path in paths if "_sysconfigdata" not in path))


@cache
def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out; the docstrings remain
        return {}
    return topics


def _read(path: Path) -> str:
    try:
        with tokenize.open(path) as file:  # honours the file's own coding line
            return file.read()
    except (SyntaxError, UnicodeDecodeError, OSError):
        return ""


def _docstrings(source: str) -> str:
    """Return the longer docstrings, joined; signatures and one-liners are not prose."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, holders))
    return "\n\n".join(text for text in found if text and len(text) >= 120)
