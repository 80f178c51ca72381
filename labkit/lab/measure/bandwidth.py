"""Measure the limits of this machine: bytes read and FLOP per second.

Decoding reads every weight once per token, so the speed of *reading* memory limits it:

    tok/s <= bytes per second / bytes read per token    (roofline, Williams et al. 2009)

A copy or a fill also writes and is slower. Compared with it, a decoder would look
better than it is. The buffer is many times larger than the last-level cache, so the
reads come from memory, and it is on huge pages if the system has them. Several ways to
read it are timed, and the fastest counts, because it differs between machines. FLOP/s
come from a square product that is large enough to be limited by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import psutil
import torch

from labkit.errors import BadRequest
from labkit.kernels import huge_pages
from labkit.lab.measure.clock import interleave, measure
from labkit.lab.measure.machine import last_level_cache_bytes

COLUMNS = 4096  # of the matrix-vector pass
SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@contextmanager
def using_threads(threads: int | None) -> Iterator[int]:
    """Run a block with `threads` threads in PyTorch; None keeps the current number."""
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
    """Return the size of the buffer to read.

    It is 8 last-level caches, but at least 256 MiB, and at most 1/8 of the available
    memory. On CUDA it is 1 GiB.
    """
    if device.startswith("cuda"):
        return 2**30
    size = max(256 * 2**20, 8 * last_level_cache_bytes())
    return max(2**22, min(size, psutil.virtual_memory().available // 8))


def read_bandwidth(device="cpu", threads: int | None = None) -> float:
    """Return the bytes per second of the fastest way to read memory.

    The measurement runs once per process, device and number of threads.
    """
    return _read_bandwidth(str(device), threads or torch.get_num_threads())


@cache
def _read_bandwidth(device: str, threads: int) -> float:
    with using_threads(threads), torch.inference_mode():
        size = buffer_bytes(device) // (4 * COLUMNS) * (4 * COLUMNS)
        flat = huge_pages.zeros(size // 4, torch.float32, device).fill_(1.0)
        matrix, vector = flat.view(-1, COLUMNS), torch.ones(COLUMNS, device=device)
        passes = {
            "sum": flat.sum,
            "dot": lambda: torch.dot(flat, flat),  # both operands are the same buffer
            "matrix-vector": lambda: torch.mv(matrix, vector),
        }
        timings = interleave(passes, repeats=7, device=device)
    return size / min(min(timing.times_s) for timing in timings.values())


def flops(dtype="fp32", device="cpu", threads: int | None = None) -> float:
    """Return the FLOP/s of a square product: 2 * n**3 / best time."""
    name = str(dtype).removeprefix("torch.")
    name = SHORT_NAMES.get(name, name)
    if name not in SHORT_NAMES.values():
        raise BadRequest(f"dtype is {dtype!r}; choose fp32, bf16 or fp16.")
    return _flops(name, str(device), threads or torch.get_num_threads())


@cache
def _flops(dtype: str, device: str, threads: int) -> float:
    best = 0.0
    with using_threads(threads), torch.inference_mode():
        for size in (256, 1024) if device == "cpu" else (1024, 8192):
            left = torch.ones(size, size, dtype=getattr(torch, dtype), device=device)
            timing = measure(lambda x=left: x @ x, repeats=5, device=device)
            best = max(best, 2 * size**3 / min(timing.times_s))
            if best * 0.1 < 2 * 1024**3:  # so slow that a larger product would take seconds
                break
    return best
