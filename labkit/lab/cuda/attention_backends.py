"""Find PyTorch's fastest attention kernel for one shape on this device, by measuring.

`scaled_dot_product_attention` has several kernels (flash, memory-efficient, cuDNN,
plain mathematics) and picks one by fixed rules. The rules were not made for decoding,
which has one query over many keys under a mask. Each kernel that accepts the arguments
is timed; the others are left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit.lab.measure.clock import interleave

NAMES = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")


def backends() -> dict[str, SDPBackend]:
    """Return the kernels that this PyTorch has, by name."""
    return {name: getattr(SDPBackend, name) for name in NAMES if hasattr(SDPBackend, name)}


def attention_times(
    call: Callable[[], object], *, repeats: int = 20, device="cpu"
) -> dict[str, float]:
    """Return {kernel: median seconds of `call`, which attends once}, fastest first."""

    def under(backend: SDPBackend) -> Callable[[], None]:
        def run() -> None:
            with sdpa_kernel(backend):
                call()

        return run

    calls = {}
    for name, backend in backends().items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch explains why a kernel does not apply
                under(backend)()
            calls[name] = under(backend)
        except RuntimeError:  # no such kernel, or not for these arguments
            continue
    timings = interleave(calls, repeats=repeats, warmup=3, device=device)
    medians = {name: timing.median_s for name, timing in timings.items()}
    return dict(sorted(medians.items(), key=lambda pair: pair[1]))
