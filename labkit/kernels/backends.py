"""Which of PyTorch's attention kernels is fastest for one shape here: measured, not assumed.

`scaled_dot_product_attention` has several (flash, memory-efficient, cuDNN, plain mathematics) and picks by rules about
what is possible. Decode asks for one query over many keys under a mask, which is not what those rules were made for.
Each kernel that accepts the arguments is timed on them; one that refuses is left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit.measure.clock import interleave

NAMES = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")


def backends() -> dict[str, SDPBackend]:
    """Those that this PyTorch knows, by name."""
    return {name: getattr(SDPBackend, name) for name in NAMES if hasattr(SDPBackend, name)}


def usable(call: Callable[[], object]) -> dict[str, SDPBackend]:
    """Those with which `call` runs: no kernel, or not for these arguments, is a RuntimeError."""
    found = {}
    for name, backend in backends().items():
        try:
            with warnings.catch_warnings(), sdpa_kernel(backend):
                warnings.simplefilter("ignore")  # PyTorch says at length why a kernel will not do
                call()
            found[name] = backend
        except RuntimeError:
            continue
    return found


def attention_times(call: Callable[[], object], *, repeats: int = 20, device="cpu") -> dict[str, float]:
    """{kernel: median seconds of `call`, which attends once}, fastest first."""

    def under(backend: SDPBackend) -> Callable[[], None]:
        def run() -> None:
            with sdpa_kernel(backend):
                call()

        return run

    timings = interleave({n: under(b) for n, b in usable(call).items()}, repeats=repeats, warmup=3, device=device)
    return dict(sorted(((name, timing.median_s) for name, timing in timings.items()), key=lambda pair: pair[1]))
