"""Measure which of PyTorch's attention kernels is the fastest for one shape.

`scaled_dot_product_attention` has several kernels (flash, memory-efficient, cuDNN,
plain mathematics) and chooses one by fixed rules. The rules are not made for decoding,
which has one query, many keys and a mask. This module times each kernel that accepts
the arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit.lab.measure.clock import interleave

NAMES = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")


def backends() -> dict[str, SDPBackend]:
    """Return the kernels of this version of PyTorch, by name."""
    return {name: getattr(SDPBackend, name) for name in NAMES if hasattr(SDPBackend, name)}


def attention_times(
    call: Callable[[], object], *, repeats: int = 20, device="cpu"
) -> dict[str, float]:
    """Return {kernel: median seconds of `call`}, fastest first.

    `call` computes attention once. Kernels that do not accept its arguments are left
    out.
    """
    calls = {}
    for name, backend in backends().items():
        run = partial(_with_kernel, backend, call)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch explains why a kernel is not possible
                run()
        except RuntimeError:  # the kernel does not exist, or does not accept the arguments
            continue
        calls[name] = run
    timings = interleave(calls, repeats=repeats, warmup=3, device=device)
    medians = {name: timing.median_s for name, timing in timings.items()}
    return dict(sorted(medians.items(), key=lambda pair: pair[1]))


def _with_kernel(backend: SDPBackend, call: Callable[[], object]) -> None:
    with sdpa_kernel(backend):
        call()
