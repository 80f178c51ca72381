"""Describe this machine. Every record of a measurement contains the description."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from labkit.kernels.native.build import cpu_flags

REPORTED = "torch transformers safetensors tokenizers gguf numpy papermill labkit".split()
INSTRUCTIONS = (
    "sse4_2 avx avx2 fma f16c avx512f avx512_vnni avx512_bf16 avx_vnni amx_tile amx_bf16 amx_int8 "
    "asimd asimddp bf16 i8mm sve"
).split()


@dataclass(frozen=True)
class Machine:
    """Hardware, operating system and versions of packages."""

    cpu: str
    cores: int  # available to this process
    threads: int  # in use by PyTorch now
    memory_bytes: int
    gpu: str | None
    gpu_memory_bytes: int | None
    os: str
    python: str
    torch: str
    versions: dict[str, str]
    instruction_sets: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields except `versions`, which a record stores separately."""
        fields = asdict(self) | {"instruction_sets": list(self.instruction_sets)}
        return {name: value for name, value in fields.items() if name != "versions"}


def machine() -> Machine:
    """Describe this machine. Everything except the number of threads is cached."""
    import torch

    return replace(_machine(), threads=torch.get_num_threads())


@cache
def _machine() -> Machine:
    import psutil
    import torch

    versions, cuda = {"python": platform.python_version()}, torch.cuda.is_available()
    for name in REPORTED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    apple = "Apple GPU (mps)" if torch.backends.mps.is_available() else None
    return Machine(
        cpu=_cpu_name(),
        cores=available_cores(),
        threads=1,
        memory_bytes=psutil.virtual_memory().total,
        gpu=torch.cuda.get_device_name(0) if cuda else apple,
        gpu_memory_bytes=torch.cuda.get_device_properties(0).total_memory if cuda else None,
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        versions=versions,
        instruction_sets=tuple(name for name in INSTRUCTIONS if name in cpu_flags()),
    )


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows have no affinity call
        return os.cpu_count() or 1


@cache
def last_level_cache_bytes() -> int:
    """Return the size of the largest cache; 64 MiB if the system reports none."""
    sizes = []
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])
    return max(sizes, default=64 * 2**20)


def _cpu_name() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        line = next(line for line in lines if line.lower().startswith("model name"))
        return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
