"""Norms and feed-forward parts of a layer.

RMS norm (Zhang and Sennrich 2019):

    y = x / sqrt(mean(x²) + eps) * w

Gemma stores w - 1. Its norm multiplies by 1 + weight in float32 and rounds once, at the end.

SwiGLU (Shazeer 2020) computes `down(silu(gate(x)) * up(x))`. It has three matrices of E x I
weights, about two thirds of a dense layer. Most of the bytes that decode reads per token are
therefore here. `gate` and `up` have the same input, so one matrix [gate | up] and one
operator compute both.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.model.config import ModelConfig


class PlusOneNorm(nn.Module):
    """Gemma's RMS norm, which multiplies by 1 + weight.

    In bfloat16, a weight near 0 has more precision than a weight near 1.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.weight.shape, weight, self.eps).to(x.dtype)


class SwiGLU(nn.Module):
    """The feed-forward part of a layer: `forward(x [B, T, E]) -> [B, T, E]`."""

    activation = staticmethod(F.silu)

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=bias)
        self.down = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [B, T, I] each
        return self.down(self.activation(gate) * up)  # [B, T, E]


class GeGLU(SwiGLU):
    """Gemma's feed-forward part, with the tanh approximation of GELU."""

    activation = staticmethod(partial(F.gelu, approximate="tanh"))


def make_norm(config: ModelConfig, size: int | None = None) -> PlusOneNorm | nn.RMSNorm:
    """Return the norm of this architecture over `size` numbers (None: the hidden size)."""
    kind = PlusOneNorm if config.is_gemma else nn.RMSNorm
    return kind(size or config.hidden_size, config.norm_eps)


def make_mlp(config: ModelConfig) -> SwiGLU:
    """Return the feed-forward part of this architecture."""
    return (GeGLU if config.is_gemma else SwiGLU)(config)
