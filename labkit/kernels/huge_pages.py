"""Allocate weights and caches on huge pages, because each step reads all of them.

With pages of 4 KiB, the processor looks up an address every 64 cache lines, and stops
prefetching at the end of each page. On a virtual machine with two cores, one thread
read 21 GB/s from ordinary pages and 33 GB/s from huge pages (2 MiB). Linux provides
huge pages on request. On other systems, and for less than 4 MiB, pages are ordinary.
The system provides the memory only when it is written.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2**21


def zeros(numbers: int, dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """Return a vector of zeros.

    Its storage has exactly its size. It is an ordinary tensor, also in inference mode.
    """
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
    """Return freed memory to the system, if the C library is able to (glibc).

    After packing, this is almost as much memory as a small model needs.
    """
    with suppress(AttributeError, OSError, TypeError):  # no malloc_trim in this C library
        ctypes.CDLL(None).malloc_trim(0)
