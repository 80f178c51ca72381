"""Measure the limits of this machine: bytes read and FLOP per second.

Decoding reads every weight once per token, so *read-only* bandwidth limits its speed:
    tok/s <= bytes per second / bytes read per token    (roofline, Williams et al. 2009)
A copy or a fill also writes, so it reaches less, and every decoder would look better
than it is. The buffer is many times larger than the last-level cache, so the reads
really come from memory. It is on huge pages if the system has them. Several read-only
passes are timed, because each machine has another fastest one. The best one counts.
FLOP/s come from a square product that is large enough to be limited by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from labkit.errors import BadRequest
from labkit.lab.measure.clock import interleave, measure
from labkit.lab.measure.machine import last_level_cache_bytes

COLUMNS = 4096  # of the matrix-vector pass
SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@contextmanager
def using_threads(threads: int | None) -> Iterator[int]:
    """Run a block with `threads` torch threads; None changes nothing."""
    import torch

    before = torch.get_num_threads()
    if threads is not None:
        if not 1 <= threads <= 1024:
            raise BadRequest(f"threads is {threads}; give 1 to 1024.")
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def buffer_bytes(device: str = "cpu") -> int:
    """Return 8 last-level caches, at least 256 MiB, at most 1/8 of free memory."""
    if device.startswith("cuda"):
        return 2**30
    import psutil

    size = max(256 * 2**20, 8 * last_level_cache_bytes())
    return max(2**22, min(size, psutil.virtual_memory().available // 8))


def read_bandwidth(device="cpu", threads: int | None = None) -> float:
    """Return bytes per second of the fastest read-only pass.

    It is measured once per process, device and number of threads.
    """
    import torch

    return _read_bandwidth(str(device), threads or torch.get_num_threads())


@cache
def _read_bandwidth(device: str, threads: int) -> float:
    import torch

    from labkit.kernels import huge_pages

    with using_threads(threads), torch.inference_mode():
        size = buffer_bytes(device) // (4 * COLUMNS) * (4 * COLUMNS)
        flat = huge_pages.zeros(size // 4, torch.float32, device).fill_(1.0)
        matrix, vector = flat.view(-1, COLUMNS), torch.ones(COLUMNS, device=device)
        passes = {
            "sum": flat.sum,
            "dot": lambda: torch.dot(flat, flat),  # both operands are one buffer, read once
            "matrix-vector": lambda: torch.mv(matrix, vector),
        }
        timings = interleave(passes, repeats=7, device=device)
    return size / min(min(timing.times_s) for timing in timings.values())


def flops(dtype="fp32", device="cpu", threads: int | None = None) -> float:
    """Return FLOP/s of a large product: 2 * n**3 over the best time."""
    import torch

    name = str(dtype).removeprefix("torch.")
    name = SHORT_NAMES.get(name, name)
    if name not in SHORT_NAMES.values():
        raise BadRequest(f"dtype is {dtype!r}; choose fp32, bf16 or fp16.")
    return _flops(name, str(device), threads or torch.get_num_threads())


@cache
def _flops(dtype: str, device: str, threads: int) -> float:
    import torch

    best = 0.0
    with using_threads(threads), torch.inference_mode():
        for size in (256, 1024) if device == "cpu" else (1024, 8192):
            left = torch.ones(size, size, dtype=getattr(torch, dtype), device=device)
            timing = measure(lambda x=left: x @ x, repeats=5, device=device)
            best = max(best, 2 * size**3 / min(timing.times_s))
            if best * 0.1 < 2 * 1024**3:  # no fast path: a large product takes seconds
                break
    return best
