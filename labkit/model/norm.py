"""RMS norm, and Gemma's: the same with a weight that is stored minus one.

    y = x / sqrt(mean(x²) + eps) * w          Gemma: * (1 + w), in float32, rounded once at the end
Source: Zhang and Sennrich 2019; the modelling file of Gemma. Cost: one pass over E numbers a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PlusOneNorm(nn.Module):
    """Gemma's: a weight near 1 would lose three bits of what it was trained to in bfloat16, one near 0 does not."""

    plus_one = True

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


def make_norm(config, size: int | None = None) -> nn.Module:
    """The norm of this architecture over `size` numbers (None: the hidden size)."""
    return (PlusOneNorm if config.is_gemma else nn.RMSNorm)(size or config.hidden_size, config.norm_eps)
