"""The native kernels: built on first use, kept in the cache folder, loaded for the instruction set of this CPU.

    library()            the loaded functions (ctypes); the first call ever compiles, about 10 s
    why_not()            None, or one sentence saying why there are none here

    LABKIT_NATIVE=auto   (default) the best of avx512bf16, avx512, avx2, neon, portable that this CPU has
    LABKIT_NATIVE=avx2   that one: the way to run, and test, another machine's path
    LABKIT_NATIVE=off    none: PyTorch's operators are used instead
    CXX=clang++          another compiler

A build is named by a hash of sources, compiler and flags, written under a temporary name and renamed, so two processes
that build at once both end with a whole file. The number of threads is an argument of each call, not of the build.

One pool of threads. PyTorch's wheel brings its own OpenMP library, whose idle threads spin for a while instead of
sleeping; a second pool could hold the cores that the first one needs. So the build is linked with the very library that
torch has loaded (`openmp_library`), and a test holds that. What does slow a step down is more busy threads than cores:
every loop ends when its last thread does, and that one may have been put aside for another process. NumPy's own BLAS is
such a case: its threads spin for some 30 ms after a product, and steps right behind one took twice as long on two cores
(PyTorch's products, transformers' and llama.cpp's steps left no trace). So nothing here multiplies by NumPy between steps.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from labkit.errors import BadRequest

SOURCES = tuple(Path(__file__).with_name(name) for name in ("native.cpp", "native_attention.cpp", "native_forward.cpp", "native_other.cpp"))
# -ffp-contract=off: a product and a sum are fused where the source says so, never where a compiler finds it convenient
# in one copy of a function and not in another; results then do not depend on the size of the batch.
FLAGS = "-std=c++17 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -w"
SETS = {  # name: (flags of the CPU, flags for the compiler), best first
    "avx512bf16": ("avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 fma f16c",
                   "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512bf16 -mavx2 -mfma -mf16c -mprefer-vector-width=512"),
    "avx512": ("avx512f avx512bw avx512vl avx512dq avx512_vnni fma f16c",
               "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx2 -mfma -mf16c -mprefer-vector-width=512"),
    "avx2": ("avx2 fma f16c", "-mavx2 -mfma -mf16c"),
    "neon": ("asimddp", "-march=armv8.2-a+dotprod"),
    "portable": ("", ""),
}  # fmt: skip
BUILD_TIMEOUT_S = 300


class NotNative(BadRequest):
    """There are no native kernels here; the sentence says why and what is used instead."""


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Instruction sets by the names that Linux gives them; elsewhere what the machine's kind implies."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        line = next(line for line in text.splitlines() if line.lower().startswith(("flags", "features")))
        return frozenset(line.partition(":")[2].split())
    except (OSError, StopIteration):
        apple = platform.system() == "Darwin" and platform.machine() == "arm64"
        return frozenset({"asimddp"} if apple else ())


def instruction_sets() -> tuple[str, ...]:
    """Those that this CPU can run, best first; "portable" is always among them."""
    return tuple(name for name, (needed, _) in SETS.items() if cpu_flags() >= set(needed.split()))


def chosen() -> str | None:
    """The instruction set in force, or None where LABKIT_NATIVE switched it off. Raises for one this CPU lacks."""
    wanted = os.environ.get("LABKIT_NATIVE", "auto").strip().lower() or "auto"
    if wanted in ("off", "0", "none"):
        return None
    here = instruction_sets()
    if wanted == "auto":
        return here[0]
    if wanted not in here:
        raise NotNative(f"LABKIT_NATIVE is {wanted!r}; this CPU can run {', '.join(here)}: set one of those, auto or off.")
    return wanted


def compiler() -> list[str] | None:
    """CXX, or the first of c++, g++ and clang++ that is on the path."""
    named = os.environ.get("CXX")
    if named is not None:
        words = shlex.split(named)
        return words if words and shutil.which(words[0]) else None
    return next(([found] for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def openmp_library() -> str | None:
    """The OpenMP library in this process once torch is imported: its file, or None where that cannot be seen."""
    import torch  # noqa: F401  (it loads the library)

    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
    files = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/") and len(line.split()) > 5}
    for kind in ("libgomp", "libiomp5", "libomp"):  # the other two answer to GCC's calls as well
        for file in sorted(files):
            if Path(file).name.startswith(kind):
                return file
    return None


@lru_cache(maxsize=8)
def _version(command: tuple[str, ...]) -> str:
    return subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60).stdout


def build(name: str) -> Path:
    """The shared library for one instruction set, compiled if it is not in the cache folder."""
    from labkit.assets import cache_dir
    from labkit.assets.progress import say

    command = compiler()
    if command is None:
        raise NotNative("No C++ compiler was found (CXX, c++, g++, clang++), so PyTorch's operators are used; install g++ for the native kernels.")
    flags, openmp = f"{FLAGS} {SETS[name][1]}".split(), openmp_library()
    parts = [platform.machine(), *command, _version(tuple(command)), *flags, str(openmp), *(f.read_text() for f in SOURCES)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    target = Path(cache_dir()) / "native" / f"{name}-{key}.so"
    if target.is_file():
        return target
    say(f"Compiling the native kernels ({name}), once, about 10 s.")
    if error := compile_to(target, SOURCES[0], flags):
        raise NotNative(f"The native kernels did not compile, so PyTorch's operators are used; {command[0]} said: {error}")
    return target


def compile_to(target: Path, source: Path, flags: list[str]) -> str:
    """Compile `source` and what it includes into a shared library; the first line of the error where that fails, or nothing.

    Two processes that want it at once: one compiles, the other waits and finds it."""
    from labkit.assets.store import lock

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock(target.stem):
            return "" if target.is_file() else _compile(target, source, flags)
    except (OSError, BadRequest) as error:  # a cache folder that cannot be written
        return str(error)


def _compile(target: Path, source: Path, flags: list[str]) -> str:
    command, openmp = compiler(), openmp_library()
    # Compiled with OpenMP, linked with torch's library by its path; the loader then finds that one, already loaded.
    link = [openmp] if openmp else ["-fopenmp"]
    attempts = [(["-fopenmp"], link), (["-Xpreprocessor", "-fopenmp"], link), ([], [])]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made, compiled = Path(scratch) / "kernels.so", Path(scratch) / "kernels.o"
        for compile_flags, link_flags in attempts:
            error = _run([*command, *flags, *compile_flags, "-c", str(source), "-o", str(compiled)])
            error = error or _run([*command, "-shared", str(compiled), "-o", str(made), *link_flags])
            if not error:
                os.replace(made, target)  # whole or not there, also after a kill
                break
    return error


def _run(command: list[str]) -> str:
    """The first line of an error, or nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[0])[:300]


def library() -> ctypes.CDLL:
    """The functions of native_forward.cpp for the instruction set in force. Raises NotNative with the reason."""
    name = chosen()
    if name is None:
        raise NotNative("The native kernels are switched off by LABKIT_NATIVE, so PyTorch's operators are used; unset it to have them.")
    return _load(name, os.environ.get("CXX"), os.environ.get("LABKIT_CACHE"))


@lru_cache(maxsize=16)
def _load(name: str, *_changes_the_build: str | None) -> ctypes.CDLL:
    from labkit.kernels import native_pack as pack

    functions = ctypes.CDLL(str(build(name)))
    structs = (pack.Matrix, pack.Layer, pack.Model, pack.Step)
    if any(functions.lk_sizes(i) != ctypes.sizeof(struct) for i, struct in enumerate(structs)):
        raise NotNative("The native kernels and native_pack.py disagree about their structures; reinstall labkit.")
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    functions.lk_forward.argtypes = [pointer, pointer]
    functions.lk_linear.argtypes = [pointer, pointer, pointer, integer, integer]
    functions.lk_rows.argtypes = [pointer, pointer, pointer, integer]
    functions.lk_rows.restype = None
    functions.instruction_set = name
    return functions


def why_not() -> str | None:
    """None where the native kernels can be used (compiled now if need be), else the reason."""
    try:
        library()
    except NotNative as reason:
        return str(reason)
    return None
