"""Memory on huge pages, for what is read from end to end in every step: weights, caches, the buffer of a measurement.

A page of 4 KiB needs an address look-up every 64 cache lines, and the processor's own fetching ahead stops at its end. On a
virtual machine of two cores one thread read 21 GB/s from ordinary pages and 33 GB/s from huge ones (2 MiB). Linux
grants them where asked; elsewhere, and below two of them, memory is ordinary. Nothing is held until it is written to.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2**21


def zeros(numbers: int, dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """A vector of zeros; its storage is exactly its numbers. An ordinary tensor also under inference mode."""
    size = numbers * dtype.itemsize
    with torch.inference_mode(False), torch.no_grad():
        if torch.device(device).type != "cpu" or size < 2 * HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.zeros(numbers, dtype=dtype, device=device)
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel built without them
        start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE
        return torch.frombuffer(memory, dtype=dtype, count=numbers, offset=start)  # keeps `memory` alive


def give_back() -> None:
    """Return freed memory to the system where the C library keeps it (glibc): after packing that is most of a small model."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        pass  # another C library, which keeps its own counsel
