"""What this machine can do at best: bytes read a second, and multiplications a second.

Decoding reads every weight once per token, so *read-only* bandwidth is the ceiling of its speed:
    tok/s <= bytes/s / bytes read per token                 (roofline, Williams et al. 2009)
A copy or a fill writes too and shows less; it would make every decoder look better than it is.
The buffer is many times the last-level cache, so that it really comes from memory, on huge pages where there are any. Several read-only
passes are tried, as none is fastest everywhere; the best pass counts, since the question is what the
machine can reach. FLOP/s is a square product large enough to be bound by arithmetic.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache

from labkit.errors import BadRequest
from labkit.measure.clock import interleave
from labkit.measure.machine import last_level_cache_bytes

ROWS = 4096                                             # columns of the matrix-vector pass


@contextmanager
def using_threads(threads: int | None):
    """Run a block with that many torch threads and put the old number back."""
    import torch
    before = torch.get_num_threads()
    if threads is not None:
        if not 1 <= threads <= 1024:
            raise BadRequest(f"{threads} threads cannot work; give 1 to 1024.")
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def buffer_bytes(device: str = "cpu") -> int:
    """At least eight last-level caches and 256 MiB, at most an eighth of the memory there is."""
    if device.startswith("cuda"):
        return 2**30
    import psutil
    wanted = max(256 * 2**20, 8 * last_level_cache_bytes())
    return max(2**22, min(wanted, psutil.virtual_memory().available // 8))


def read_bandwidth(device="cpu", threads: int | None = None) -> float:
    """Bytes a second of the fastest read-only pass; measured once per process, device and thread count."""
    import torch
    return _read_bandwidth(str(device), torch.get_num_threads() if threads is None else threads)


@cache
def _read_bandwidth(device: str, threads: int) -> float:
    import torch

    from labkit.measure import pages
    with using_threads(threads), torch.inference_mode():
        size = buffer_bytes(device) // (4 * ROWS) * (4 * ROWS)
        flat = pages.zeros(size // 4, torch.float32, device).fill_(1.0)
        matrix, vector = flat.view(-1, ROWS), torch.ones(ROWS, device=device)
        passes = {
            "sum": lambda: flat.sum(),
            "dot": lambda: torch.dot(flat, flat),       # both operands are one buffer: its bytes are read once
            "matrix-vector": lambda: torch.mv(matrix, vector),
        }
        timings = interleave(passes, repeats=7, warmup=1, device=device)
    return size / min(min(timing.times_s) for timing in timings.values())


def flops(dtype="float32", device="cpu", threads: int | None = None) -> float:
    """Floating-point operations a second of a large product: 2 * n**3 over the best time."""
    import torch
    name = str(dtype).removeprefix("torch.")
    return _flops({"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(name, name), str(device),
                  torch.get_num_threads() if threads is None else threads)


@cache
def _flops(dtype: str, device: str, threads: int) -> float:
    import torch
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise BadRequest(f"dtype {dtype!r} has no product to time; use float32, bfloat16 or float16.")
    best = 0.0
    with using_threads(threads), torch.inference_mode():
        for size in (256, 1024) if device == "cpu" else (1024, 8192):
            left = torch.ones(size, size, dtype=kind, device=device)
            timing = interleave({"product": lambda x=left: x @ x}, repeats=5, warmup=1, device=device)["product"]
            best = max(best, 2 * size**3 / min(timing.times_s))
            if best * 0.1 < 2 * 1024**3:                   # no fast path for this dtype: a large product takes seconds
                break
    return best
