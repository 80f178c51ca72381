"""The parts of a layer besides attention: norms, and the feed-forward half.

RMS norm (Zhang and Sennrich 2019), and Gemma's, whose weight is stored minus one:

    y = x / sqrt(mean(x²) + eps) * w          Gemma: * (1 + w), in float32, rounded once at the end

SwiGLU, `down(silu(gate(x)) * up(x))` (Shazeer 2020): three matrices of E x I, two thirds of
a dense layer's weights, so in decode most of the bytes read per token are here. `gate` and
`up` read the same input, so they are one matrix [gate | up] and one operator.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.model.config import ModelConfig


class PlusOneNorm(nn.Module):
    """Gemma's norm: in bfloat16, a weight near 0 keeps three more bits than one near 1."""

    plus_one = True

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.weight.shape, weight, self.eps).to(x.dtype)


class SwiGLU(nn.Module):
    """Map [B, T, E] to [B, T, E]; other feed-forwards are other classes with this call."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=bias)
        self.down = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [B, T, I] each
        return self.down(F.silu(gate) * up)  # [B, T, E]


class GeGLU(SwiGLU):
    """Gemma's feed-forward: the gate goes through the tanh approximation of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate, approximate="tanh") * up)


def make_norm(config: ModelConfig, size: int | None = None) -> PlusOneNorm | nn.RMSNorm:
    """Return this architecture's norm over `size` numbers (None: the hidden size)."""
    kind = PlusOneNorm if config.is_gemma else nn.RMSNorm
    return kind(size or config.hidden_size, config.norm_eps)


def make_mlp(config: ModelConfig) -> SwiGLU:
    """Return this architecture's feed-forward."""
    return (GeGLU if config.is_gemma else SwiGLU)(config)
