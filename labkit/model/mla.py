"""Multi-head latent attention: one short vector a token stands for the keys and values of all heads.

    c = norm(W_down x)  [C]        k_h = W_k,h c,  v_h = W_v,h c        and one rotated key of R numbers for all heads
    q_h . k_h = (W_k,h^T q_h) . c  so the query is brought to the latent's side ("absorbed") and no k_h is ever made

    bytes a token and layer = (C + R) numbers, whatever the number of heads; GQA: 2 * K * D

DeepSeek-V2 (arXiv 2405.04434), without its low-rank queries. A rotation cannot be absorbed (it stands between W_k and q),
which is why R numbers are apart. It loses on operations: each head's scores are C + R products instead of D. It is how a
model is trained: an existing GQA model has no latent that its keys and values follow from, so it cannot be switched on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.model.attention import causal_attention
from labkit.model.config import ModelConfig
from labkit.model.norm import make_norm
from labkit.model.rope import rotate


class LatentAttention(nn.Module):
    """The call of `Attention`; its cache holds [latent | rotated key] as one KV head of C + R numbers."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        E, H, D, C, R = (config.hidden_size, config.num_heads, config.head_dim, config.latent_dim, config.rope_dim)
        self.layer, self.window = layer, config.window(layer)
        self.num_heads, self.head_dim, self.latent_dim, self.rope_dim = H, D, C, R
        self.q = nn.Linear(E, H * (D + R), bias=False)
        self.kv_down = nn.Linear(E, C + R, bias=False)
        self.kv_norm = make_norm(config, C)
        self.k_up = nn.Linear(C, H * D, bias=False)  # W_k of all heads
        self.v_up = nn.Linear(C, H * D, bias=False)
        self.o = nn.Linear(H * D, E, bias=False)
        self.scale = (D + R) ** -0.5

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache=None) -> Tensor:
        B, T, _ = x.shape
        H, D, C, R = self.num_heads, self.head_dim, self.latent_dim, self.rope_dim
        plain, turning = self.q(x).view(B, T, H, D + R).transpose(1, 2).split((D, R), -1)  # [B, H, T, D], [B, H, T, R]
        absorbed = torch.einsum("bhtd,hdc->bhtc", plain, self.k_up.weight.view(H, D, C))
        queries = torch.cat((absorbed, rotate(turning, cos, sin)), -1)  # [B, H, T, C + R]
        latent, key = self.kv_down(x).split((C, R), -1)
        latent = self.kv_norm(latent)[:, None]  # [B, 1, T, C]
        keys = torch.cat((latent, rotate(key[:, None], cos, sin)), -1)  # [B, 1, T, C + R]
        if cache is None:
            out = causal_attention(queries, keys, latent, self.window, self.scale)
        else:
            cache.append(self.layer, keys, latent)
            out = cache.attend(self.layer, queries, self.scale)  # [B, H, T, C]
        heads = torch.einsum("bhtc,hdc->bthd", out, self.v_up.weight.view(H, D, C))
        return self.o(heads.reshape(B, T, H * D))  # [B, T, E]
