"""Decode on CUDA in steps of fixed shape; choose the dtype and the attention kernel."""

from __future__ import annotations

import torch


def best_dtype(device: str | torch.device) -> torch.dtype:
    """Return the fastest float dtype on CUDA, and float32 on other devices.

    On CUDA it is bfloat16 from compute capability 8.0 on, and float16 below (T4, V100).
    `torch.cuda.is_bf16_supported()` does not tell: it is True on a T4, which emulates
    bfloat16 slowly.
    """
    kind = torch.device(device)
    if kind.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(kind) >= (8, 0) else torch.float16
