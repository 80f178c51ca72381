"""Count the bytes of tensors and of the process.

`tensor_bytes` adds up *storages*, each once: a view adds nothing, a tied weight counts
once, and a slice of a large buffer counts as the whole buffer. `peak_memory` reports
the largest resident size of the process inside a block. Linux can reset its record of
the peak (write 5 to /proc/self/clear_refs). On other systems a thread reads the size
every 2 ms and can miss a shorter peak. `Peak.method` says which method was used.
Limitation: resident memory includes mapped files and memory that the allocator keeps
for later.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import psutil
import torch


def tensor_bytes(*objects) -> int:
    """Return the bytes of the distinct storages of tensors, modules and containers."""
    storages: dict[tuple, int] = {}
    visited: set[int] = set()
    for obj in objects:
        _collect(obj, storages, visited)
    return sum(storages.values())


def _collect(obj, storages: dict, visited: set[int]) -> None:
    if isinstance(obj, torch.Tensor):
        storage = obj.untyped_storage()
        storages[(str(obj.device), storage.data_ptr())] = storage.nbytes()
        return
    nothing = (type(None), str, bytes, int, float, torch.dtype, torch.device)
    if isinstance(obj, nothing) or id(obj) in visited:
        return
    visited.add(id(obj))
    if isinstance(obj, torch.nn.Module):  # and tensors in attributes that are not registered
        attributes = [value for child in obj.modules() for value in vars(child).values()]
        outside = (value for value in attributes if torch.is_tensor(value) or _is_record(value))
        parts = [*obj.parameters(), *obj.buffers(), *outside]
    elif isinstance(obj, Mapping):
        parts = list(obj.values())
    elif _is_record(obj):
        parts = [getattr(obj, field.name) for field in fields(obj)]
    elif type(obj).__module__.split(".")[0] == "labkit" or hasattr(obj, "nbytes"):
        parts = list(getattr(obj, "__dict__", {}).values())
    else:
        parts = list(obj) if hasattr(obj, "__iter__") else []
    for part in parts:
        _collect(part, storages, visited)


def _is_record(obj) -> bool:
    return is_dataclass(obj) and not isinstance(obj, type)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return psutil.Process().memory_info().rss


@dataclass
class Peak:
    """The largest resident size in a block; `bytes` is set when the block ends."""

    start_bytes: int
    method: str
    bytes: int = 0

    @property
    def grown_bytes(self) -> int:
        return self.bytes - self.start_bytes


@contextmanager
def peak_memory(device="cpu") -> Iterator[Peak]:
    """Measure the peak memory of a block; read `peak.bytes` after the block.

    On CUDA the peak is that of PyTorch's allocator.
    """
    if str(device).startswith("cuda"):
        yield from _cuda_peak(device)
    elif _reset_high_water():
        peak = Peak(resident_bytes(), "VmHWM reset by /proc/self/clear_refs")
        yield peak
        peak.bytes = _high_water()
    else:
        yield from _sampled_peak()


def _cuda_peak(device) -> Iterator[Peak]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    peak = Peak(torch.cuda.memory_allocated(device), "torch.cuda.max_memory_allocated")
    yield peak
    torch.cuda.synchronize(device)
    peak.bytes = torch.cuda.max_memory_allocated(device)


def _sampled_peak(every_s: float = 0.002) -> Iterator[Peak]:
    peak = Peak(resident_bytes(), f"resident size sampled every {every_s * 1000:g} ms")
    ended = threading.Event()

    def watch() -> None:
        while True:
            peak.bytes = max(peak.bytes, resident_bytes())
            if ended.wait(every_s):
                return

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
        Path("/proc/self/clear_refs").write_text("5")
        # Some sandboxes accept the write, but do not reset the peak.
        return _high_water() <= resident_bytes() + 64 * 2**20
    except OSError:
        return False


def _high_water() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    if "VmHWM:" not in status:
        raise OSError("This system does not report the peak memory of a process.")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
