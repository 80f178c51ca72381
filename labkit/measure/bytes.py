"""Bytes, counted where they lie: on the tensors, and in the process.

`tensor_bytes` adds up *storages*, each once: a view costs nothing, a tied weight is counted once, and a
slice of a big buffer keeps the whole buffer alive. `peak_memory` reports the highest resident size of the
process inside a block. Linux can reset its own high-water mark (write 5 to /proc/self/clear_refs); elsewhere
a thread looks every 2 ms, which may miss a shorter peak; `method` says which it was.
When it loses: resident memory counts mapped files and what the allocator kept; it is not what was asked for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass


def tensor_bytes(*objects) -> int:
    """Bytes of the distinct storages behind tensors, modules, caches, and containers of them."""
    storages: dict[tuple, int] = {}
    visited: set[int] = set()
    for obj in objects:
        _collect(obj, storages, visited)
    return sum(storages.values())


def _collect(obj, storages: dict, visited: set[int]) -> None:
    import torch
    if isinstance(obj, torch.Tensor):
        storage = obj.untyped_storage()
        storages[(str(obj.device), storage.data_ptr())] = storage.nbytes()
        return
    if obj is None or isinstance(obj, (str, bytes, int, float, torch.dtype, torch.device)) or id(obj) in visited:
        return
    visited.add(id(obj))
    if isinstance(obj, torch.nn.Module):
        parts: Iterable = [*obj.parameters(), *obj.buffers(), *_packed(obj)]
    elif isinstance(obj, Mapping):
        parts = list(obj.values())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        parts = list(obj)
    elif is_dataclass(obj) and not isinstance(obj, type):
        parts = [getattr(obj, field.name) for field in fields(obj)]
    elif type(obj).__module__.split(".")[0] == "labkit" or hasattr(obj, "nbytes"):
        parts = list(getattr(obj, "__dict__", {}).values())
    elif hasattr(obj, "__iter__"):
        parts = list(obj)
    else:
        return
    for part in parts:
        _collect(part, storages, visited)


def _packed(module) -> list:
    """Tensors that a module keeps outside its parameters and buffers, such as packed codes in a plain attribute."""
    import torch
    inside = []
    for child in module.modules():
        for name, value in vars(child).items():
            if name.startswith("_") and name in ("_parameters", "_buffers", "_modules"):
                continue
            if isinstance(value, torch.Tensor) or (is_dataclass(value) and not isinstance(value, type)):
                inside.append(value)
    return inside


def resident_bytes() -> int:
    """What the process holds in memory now."""
    import psutil
    return psutil.Process().memory_info().rss


@dataclass
class Peak:
    """Filled when the block ends. `bytes`: highest resident size; `start_bytes`: at its beginning."""

    start_bytes: int = 0
    bytes: int = 0
    method: str = ""

    @property
    def grown_bytes(self) -> int:
        return self.bytes - self.start_bytes


@contextmanager
def peak_memory(device="cpu"):
    """`with peak_memory() as peak: ...` then `peak.bytes`; on CUDA the allocator's own high-water mark."""
    if str(device).startswith("cuda"):
        yield from _cuda_peak(device)
    elif _reset_high_water():
        peak = Peak(start_bytes=resident_bytes(), method="VmHWM reset by /proc/self/clear_refs")
        yield peak
        peak.bytes = _high_water()
    else:
        yield from _sampled_peak()


def _cuda_peak(device):
    import torch
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    peak = Peak(start_bytes=torch.cuda.memory_allocated(device), method="torch.cuda.max_memory_allocated")
    yield peak
    torch.cuda.synchronize(device)
    peak.bytes = torch.cuda.max_memory_allocated(device)


def _sampled_peak(every_s: float = 0.002):
    peak = Peak(start_bytes=resident_bytes(), method=f"resident size sampled every {every_s * 1000:g} ms")
    peak.bytes = peak.start_bytes
    ended = threading.Event()

    def watch():
        while not ended.wait(every_s):
            peak.bytes = max(peak.bytes, resident_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()
        peak.bytes = max(peak.bytes, resident_bytes())


def _reset_high_water() -> bool:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return _high_water() <= resident_bytes() + 64 * 2**20     # some sandboxes accept the write and ignore it
    except OSError:
        return False


def _high_water() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise OSError(f"process {os.getpid()} has no high-water mark")
