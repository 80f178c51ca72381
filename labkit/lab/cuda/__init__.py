"""Decoding on CUDA: steps of fixed shape, the choice of dtype and kernel."""

from __future__ import annotations

import torch


def best_dtype(device: str | torch.device) -> torch.dtype:
    """Return the dtype to compute in: float32, or on CUDA the fastest 16-bit float.

    On CUDA that is bfloat16 from compute capability 8.0 on, and float16 below (T4,
    V100). `torch.cuda.is_bf16_supported()` is True on a T4, which emulates bfloat16
    slowly.
    """
    kind = torch.device(device)
    if kind.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(kind) >= (8, 0) else torch.float16
