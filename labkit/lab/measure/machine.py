"""Describe this machine; each record of a measurement contains the description."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

REPORTED = "torch transformers safetensors tokenizers gguf numpy papermill labkit".split()
INSTRUCTIONS = (
    "sse4_2 avx avx2 fma f16c avx512f avx512_vnni avx512_bf16 avx_vnni amx_tile amx_bf16 amx_int8 "
    "asimd asimddp bf16 i8mm sve"
).split()


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int  # that this process may use
    threads: int  # that torch uses now
    memory_bytes: int
    gpu: str | None
    gpu_memory_bytes: int | None
    os: str
    python: str
    torch: str | None
    versions: dict[str, str]
    instruction_sets: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields except `versions`, which a record stores separately."""
        fields = asdict(self) | {"instruction_sets": list(self.instruction_sets)}
        del fields["versions"]
        return fields


def machine() -> Machine:
    """Describe this machine; everything except the number of threads is cached."""
    try:
        import torch
    except ImportError:
        return Machine(threads=1, torch=None, **_fixed())
    return Machine(threads=torch.get_num_threads(), torch=torch.__version__, **_fixed())


@cache
def _fixed() -> dict[str, Any]:
    import psutil

    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("features") or "").split())
    gpu, gpu_memory = _gpu()
    versions = {"python": platform.python_version()}
    for name in REPORTED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "cores": available_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": gpu,
        "gpu_memory_bytes": gpu_memory,
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
        "instruction_sets": tuple(name for name in INSTRUCTIONS if name in flags),
    }


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


def _gpu() -> tuple[str | None, int | None]:
    try:
        import torch
    except ImportError:
        return None, None
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
    return ("Apple GPU (mps)" if torch.backends.mps.is_available() else None), None


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key.strip().lower(): value.strip() for key, value in pairs}
