"""What this machine is: the part of a record that makes a number mean something."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from typing import Any

REPORTED = ("torch", "transformers", "safetensors", "tokenizers", "gguf", "numpy", "papermill", "labkit")
INSTRUCTIONS = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni",
                "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "bf16", "i8mm", "sve")


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int                              # that this process may use
    threads: int                            # that torch uses now
    memory_bytes: int
    gpu: str | None
    gpu_memory_bytes: int | None
    os: str
    python: str
    torch: str | None
    versions: dict[str, str]
    instruction_sets: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["instruction_sets"] = list(self.instruction_sets)
        del plain["versions"]               # a field of its own in a record
        return plain


def machine() -> Machine:
    """Asked for at each record, as the number of threads may change; the slow parts are looked up once."""
    torch = _torch()
    fixed = _fixed()
    return Machine(threads=torch.get_num_threads() if torch else 1, torch=torch.__version__ if torch else None, **fixed)


@cache
def _fixed() -> dict[str, Any]:
    import psutil
    gpu, gpu_memory = _gpu()
    return {"cpu": _cpu_name(), "cores": available_cores(), "memory_bytes": psutil.virtual_memory().total,
            "gpu": gpu, "gpu_memory_bytes": gpu_memory, "os": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(), "versions": _versions(), "instruction_sets": _instructions()}


def available_cores() -> int:
    """Cores this process may run on: fewer than the machine has inside a container or under taskset."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:                  # macOS and Windows have no affinity call
        return os.cpu_count() or 1


@cache
def last_level_cache_bytes() -> int:
    """Size of the largest cache the system reports, or 64 MiB where it reports none."""
    sizes = []
    folder = "/sys/devices/system/cpu/cpu0/cache"
    try:
        for index in os.listdir(folder):
            if index.startswith("index"):
                with open(f"{folder}/{index}/size") as file:
                    text = file.read().strip()
                sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])
    except (OSError, ValueError, KeyError, IndexError):
        pass
    return max(sizes, default=64 * 2**20)


def _torch():
    try:
        import torch
    except ImportError:
        return None
    return torch


def _gpu() -> tuple[str | None, int | None]:
    torch = _torch()
    if torch is None:
        return None, None
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
    return ("Apple GPU (mps)" if torch.backends.mps.is_available() else None), None


def _cpuinfo() -> dict[str, str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            pairs = (line.split(":", 1) for line in file if ":" in line)
            return {key.strip().lower(): value.strip() for key, value in pairs}
    except OSError:
        return {}


def _cpu_name() -> str:
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def _instructions() -> tuple[str, ...]:
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("features") or "").split())
    return tuple(name for name in INSTRUCTIONS if name in flags)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in REPORTED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found
