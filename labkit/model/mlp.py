"""The feed-forward half of a layer: SwiGLU, `down(silu(gate(x)) * up(x))` (Shazeer 2020).

Three matrices of E × I, two thirds of a dense layer's weights: in decode, most of the bytes read per token are here.
`gate` and `up` read the same input, so they are one matrix [gate | up] and one operator.
Other feed-forwards (tanh-GELU, experts) are other classes with this call; `make_mlp` chooses by the configuration.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from labkit.model.config import ModelConfig


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [B, T, I] each
        return self.down(F.silu(gate) * up)  # [B, T, E]


class GeGLU(SwiGLU):
    """Gemma's: the gate through the tanh approximation of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate, approximate="tanh") * up)


def make_mlp(config: ModelConfig) -> nn.Module:
    return (GeGLU if config.is_gemma else SwiGLU)(config)
