"""Build the native kernels for this CPU on first use, then cache and load them.

    library()              the loaded functions (ctypes); the first call compiles, about 10 s
    unsupported_reason()   None, or the reason why the kernels cannot run here

    LABKIT_NATIVE=auto     (default) the best of avx512bf16, avx512, avx2, neon, portable
    LABKIT_NATIVE=avx2     this one, to run or test the code of another machine
    LABKIT_NATIVE=off      none; PyTorch's operators are used instead
    CXX=clang++            another compiler

The name of a build contains a hash of sources, compiler and flags. A build is written
under a temporary name and renamed, so two processes that build at the same time both
get a complete file. The number of threads is an argument of each call, not of the
build.

All kernels share one pool of threads. PyTorch's wheel has its own OpenMP library. Its
idle threads spin for a while before they sleep, and a second pool could occupy the
cores that they need. The build is therefore linked with the library that torch has
loaded (`openmp_library`). A step is slow if more threads are busy than there are cores,
because every loop waits for its last thread. NumPy's BLAS has such threads: they spin
for about 30 ms after a product, and on two cores a step right after one took twice as
long. (Products of PyTorch and steps of transformers and llama.cpp had no such effect.)
labkit therefore does not multiply with NumPy between steps.
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
from labkit.files import cache_dir, lock, say
from labkit.kernels.native import structures

FOLDER = Path(__file__).parent
# Each of these is one library; native.cpp includes the other sources.
DECODER, TABLES = "native.cpp", "table_attention.cpp"
FLAGS = "-std=c++17 -O3 -fno-math-errno -fno-trapping-math -fPIC -w"
# In the decoder, only the source decides whether a product and a sum are fused. A compiler could
# fuse them in one copy of a function and not in another, and results would depend on the batch.
CONTRACT = {DECODER: "-ffp-contract=off", TABLES: "-ffp-contract=fast"}
_AVX512 = "avx512f avx512bw avx512vl avx512dq avx512_vnni"
_WIDE = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx2 -mfma -mf16c"
_WIDE += " -mprefer-vector-width=512"
SETS = {  # name: (flags of the CPU, flags for the compiler), best first
    "avx512bf16": (f"{_AVX512} avx512_bf16 fma f16c", f"{_WIDE} -mavx512bf16"),
    "avx512": (f"{_AVX512} fma f16c", _WIDE),
    "avx2": ("avx2 fma f16c", "-mavx2 -mfma -mf16c"),
    "neon": ("asimddp", "-march=armv8.2-a+dotprod"),
    "portable": ("", ""),
}
BUILD_TIMEOUT_S = 300
INSTEAD = "so PyTorch's operators are used"


class NotNative(BadRequest):
    """There are no native kernels; the message says why, and what is used instead."""


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Return the instruction sets of this CPU, with Linux's names."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        line = next(line for line in lines if line.lower().startswith(("flags", "features")))
        return frozenset(line.partition(":")[2].split())
    except (OSError, StopIteration):
        apple = platform.system() == "Darwin" and platform.machine() == "arm64"
        return frozenset({"asimddp"} if apple else ())


def instruction_sets() -> tuple[str, ...]:
    """Return the names in `SETS` that this CPU can run, best first."""
    return _sets_of(cpu_flags())


@lru_cache
def _sets_of(flags: frozenset[str]) -> tuple[str, ...]:
    return tuple(name for name, (needed, _) in SETS.items() if flags >= set(needed.split()))


def chosen() -> str | None:
    """Return the instruction set in use, or None if LABKIT_NATIVE is off.

    Raises NotNative for an instruction set that this CPU does not have.
    """
    name = os.environ.get("LABKIT_NATIVE", "auto").strip().lower() or "auto"
    if name in ("off", "0", "none"):
        return None
    here = instruction_sets()
    if name != "auto" and name not in here:
        raise NotNative(f"LABKIT_NATIVE is {name!r}; choose {', '.join(here)}, auto or off.")
    return here[0] if name == "auto" else name


def compiler() -> list[str] | None:
    """Return the words of CXX, or the first of c++, g++ and clang++; None if there is none."""
    named = os.environ.get("CXX")
    commands = [["c++"], ["g++"], ["clang++"]] if named is None else [shlex.split(named)]
    return next((words for words in commands if words and shutil.which(words[0])), None)


def openmp_library() -> str | None:
    """Return the path of the OpenMP library that torch has loaded, or None."""
    import torch  # noqa: F401  (loads the library)

    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    files = sorted({line.split(maxsplit=5)[5] for line in lines if "/" in line})
    kinds = ("libgomp", "libiomp5", "libomp")  # the last two also accept GCC's calls
    return next((f for kind in kinds for f in files if Path(f).name.startswith(kind)), None)


@lru_cache(maxsize=8)
def _version(command: tuple[str, ...]) -> str:
    return subprocess.run(
        [*command, "--version"], capture_output=True, text=True, timeout=60
    ).stdout


def build(name: str, source: str = DECODER) -> Path:
    """Return the path of the shared library of `source`; compile it if it is not cached.

    Raises NotNative if there is no compiler, or if compiling fails.
    """
    command, openmp = compiler(), openmp_library()
    if command is None:
        raise NotNative(f"No C++ compiler was found, {INSTEAD}; install g++ or set CXX.")
    flags = f"{FLAGS} {CONTRACT[source]} {SETS[name][1]}".split()
    texts = [file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.cpp"))]
    parts = [platform.machine(), *command, _version(tuple(command)), *flags, str(openmp), *texts]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    target = Path(cache_dir()) / "native" / f"{Path(source).stem}-{name}-{key}.so"
    if target.is_file():
        return target
    say(f"Compiling {source} for {name}, once, about 10 s.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock(target.stem):  # of two processes one compiles, the other waits
            error = "" if target.is_file() else _compile(target, source, [*command, *flags], openmp)
    except (OSError, BadRequest) as reason:  # a cache folder that cannot be written
        error = str(reason)
    if error:
        raise NotNative(f"{source} did not compile, {INSTEAD}; fix this error: {error}")
    return target


def _compile(target: Path, source: str, command: list[str], openmp: str | None) -> str:
    """Compile one source; return the first line of an error, or an empty text."""
    # Link with torch's OpenMP library by its path: the loader finds it already loaded.
    link = [openmp] if openmp else ["-fopenmp"]
    attempts = [(["-fopenmp"], link), (["-Xpreprocessor", "-fopenmp"], link), ([], [])]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        compiled, linked = f"{scratch}/kernels.o", f"{scratch}/kernels.so"
        for compile_flags, link_flags in attempts:
            error = _run([*command, *compile_flags, "-c", str(FOLDER / source), "-o", compiled])
            error = error or _run([*command, "-shared", compiled, "-o", linked, *link_flags])
            if not error:
                os.replace(linked, target)  # complete or absent, even if the process is killed
                break
    return error


def _run(command: list[str]) -> str:
    """Run a command; return the first line of an error, or an empty text."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[0])[:300]


def library(source: str = DECODER) -> ctypes.CDLL:
    """Return the compiled functions of a source for the instruction set in use.

    Raises NotNative if the kernels cannot run here.
    """
    name = chosen()
    if name is None:
        raise NotNative(f"LABKIT_NATIVE turns the native kernels off, {INSTEAD}; set it to auto.")
    functions = _load(source, name, os.environ.get("CXX"), os.environ.get("LABKIT_CACHE"))
    if isinstance(functions, NotNative):
        raise functions
    return functions


@lru_cache(maxsize=32)
def _load(source: str, name: str, *_changes_the_build: str | None) -> ctypes.CDLL | NotNative:
    """Load a library and declare its functions; a failure is cached, too."""
    try:
        functions = ctypes.CDLL(str(build(name, source)))
    except NotNative as reason:
        return reason
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    if source == TABLES:
        functions.attend.argtypes, functions.attend.restype = [pointer], None
        return functions
    structs = (structures.Matrix, structures.Layer, structures.Model, structures.Step)
    if any(functions.lk_sizes(i) != ctypes.sizeof(struct) for i, struct in enumerate(structs)):
        return NotNative("structures.py does not match the C++ sources; reinstall labkit.")
    functions.lk_forward.argtypes = [pointer, pointer]
    functions.lk_linear.argtypes = [pointer, pointer, pointer, integer, integer]
    functions.lk_rows.argtypes = [pointer, pointer, pointer, integer]
    functions.lk_rows.restype = None
    functions.instruction_set = name  # type: ignore[attr-defined]
    return functions


def unsupported_reason(source: str = DECODER) -> str | None:
    """Return None if the kernels work here, or the reason. May compile."""
    try:
        library(source)
    except NotNative as reason:
        return str(reason)
    return None
