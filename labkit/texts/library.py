"""Text that every Python carries: its standard library, split once into three parts.

A file belongs to `evaluation` (10 %), `calibration` (10 %) or `training` (80 %) by a hash of its name
alone, so the split is the same on every machine, in every run, whatever the seed. Code is the source;
prose is pydoc's topics (each a document of its own) and the docstrings of the files. A run of lines that
also stands in an evaluation file (a licence header, a copied function) is cut out of the other parts.

The library differs between Python versions, so the version is part of every result made from it:
record `revision()`.
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
# Not the library itself: what is installed into it, tests, generated tables, other people's code.
_SKIP = {
    "__pycache__", "config", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo", "_vendor",
}  # fmt: skip


@dataclass(frozen=True)
class Document:
    name: str
    text: str


def revision() -> str:
    return f"Python {platform.python_version()} standard library"


def part_of(name: str) -> str:
    """The part that a name belongs to; nothing but the name decides."""
    share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
    return "evaluation" if share < 0.1 else "calibration" if share < 0.2 else "training"


@cache
def names(kind: str, part: str) -> tuple[str, ...]:
    """Names of the documents of a part; `library/…` are files, `topics/…` are pydoc's."""
    found = ["library/" + path for path in _files()]
    if kind == "prose":
        found += ["topics/" + topic for topic in _topics()]
    elif kind != "code":
        raise BadRequest(f"There is no text of kind {kind!r}; choose 'code' or 'prose'.")
    return tuple(name for name in sorted(found) if part_of(name) == part)


def document(kind: str, name: str) -> Document:
    """One document, without the runs of lines that an evaluation document also has."""
    text = _raw(kind, name)
    if part_of(name) != "evaluation":
        text = without_runs(text, _evaluation_runs())
    return Document(name, text)


def without_runs(text: str, forbidden: set[int]) -> str:
    """The text less every line that lies in a run of RUN lines found in `forbidden`."""
    lines = text.split("\n")
    kept = [number for number, line in enumerate(lines) if line.strip()]  # blank lines do not break a run
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
            f"This Python carries no library source in {root}; use one that does (python.org, conda, the system's)."
        )
    return root


@cache
def _files() -> tuple[str, ...]:
    found = []
    for folder, folders, files in os.walk(_root()):
        folders[:] = [name for name in folders if name not in _SKIP and not name.startswith("config-")]
        # _sysconfigdata… is of this build, not of Python
        found += [Path(folder, name) for name in files if name.endswith(".py") and "_sysconfigdata" not in name]
    return tuple(sorted(path.relative_to(_root()).as_posix() for path in found))


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
    """Docstrings of some length, one after the other; signatures and one-liners are not prose."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, holders))
    return "\n\n".join(text for text in found if text and len(text) >= 120)
