"""Allocate weights and caches, which every step reads completely, on huge pages.

A page of 4 KiB needs an address look-up every 64 cache lines, and the processor's
prefetching stops at its end. On a virtual machine of two cores one thread read 21 GB/s
from ordinary pages and 33 GB/s from huge ones (2 MiB). Linux provides huge pages on
request. On other systems, and for less than 4 MiB, pages are ordinary. Memory is
allocated only when it is written to.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2**21


def zeros(numbers: int, dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """Return zeros in a storage of exactly their size, even in inference mode."""
    size = numbers * dtype.itemsize
    small = size < 2 * HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE")
    with torch.inference_mode(False), torch.no_grad():
        if small or torch.device(device).type != "cpu":
            return torch.zeros(numbers, dtype=dtype, device=device)
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a Linux without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE
        return torch.frombuffer(memory, dtype=dtype, count=numbers, offset=start)  # keeps `memory`


def give_back() -> None:
    """Return freed memory to the system if the C library can (glibc).

    After packing, the freed memory is almost as large as a small model.
    """
    with suppress(AttributeError, OSError, TypeError):  # no malloc_trim in this C library
        ctypes.CDLL(None).malloc_trim(0)
