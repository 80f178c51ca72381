"""Which 16-bit float a device computes in: bfloat16 where the hardware has it, else float16.

`torch.cuda.is_bf16_supported()` says yes on a T4, where bfloat16 is emulated and slow; compute capability 8.0 is the truth.
"""

from __future__ import annotations

import torch


def best_dtype(device: str | torch.device) -> torch.dtype:
    """float32 on a CPU, where exactness is claimed; on CUDA bfloat16 from capability 8.0 on, float16 below (T4, V100)."""
    kind = torch.device(device)
    if kind.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(kind) >= (8, 0) else torch.float16
