"""A kernel that is one C++ file: compiled on first use for this CPU, kept in the cache folder, loaded.

Compiler, flags, instruction set and OpenMP library are those of `native.py`. A build is named by a hash of all that
goes into it and compiled by the same function, so that two processes that build at once both end with a whole file.
None where there is no compiler, where it fails, or where LABKIT_NATIVE=off: the plain way then serves.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from functools import lru_cache
from pathlib import Path

from labkit.kernels import native


def functions_of(source: Path) -> ctypes.CDLL | None:
    """The functions of that file for the instruction set in force."""
    name = native.chosen()
    return None if name is None else _build(source, name, os.environ.get("CXX"), os.environ.get("LABKIT_CACHE"))


@lru_cache(maxsize=16)
def _build(source: Path, name: str, *_changes_the_build: str | None) -> ctypes.CDLL | None:
    from labkit.assets import cache_dir

    command, openmp = native.compiler(), native.openmp_library()
    if command is None:
        return None
    flags = f"{native.FLAGS} {native.SETS[name][1]}".replace("-ffp-contract=off", "-ffp-contract=fast").split()
    parts = [*command, *flags, str(openmp), source.read_text(encoding="utf-8")]
    target = Path(cache_dir()) / "native" / f"{source.stem}-{name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
    if not target.is_file() and native.compile_to(target, source, flags):
        return None
    return ctypes.CDLL(str(target))
