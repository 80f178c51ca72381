"""Multi-head latent attention (MLA): cache one short vector per token for all heads.

    c = norm(W_down x)  [C]
    k_h = W_k,h c,  v_h = W_v,h c
    q_h . k_h = (W_k,h^T q_h) . c

The last line multiplies the query by W_k,h, so that keys k_h are never computed ("absorbed"
weights). RoPE cannot be absorbed, because its rotation stands between W_k and q. One
rotated key of R numbers therefore serves all heads. The cache stores C + R numbers per
token and layer for any number of heads; GQA stores 2 * K * D.

Source: DeepSeek-V2 (arXiv 2405.04434), here without its low-rank queries.

When it loses: each score needs C + R products instead of D, so MLA computes more. A model
must be trained with MLA, because the keys and values of a GQA model do not follow from a
latent vector.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.cache.contract import KVCache
from labkit.model.attention import causal_attention
from labkit.model.config import ModelConfig
from labkit.model.norm_mlp import make_norm
from labkit.model.rope import rotate


class LatentAttention(nn.Module):
    """Latent attention of one layer, with the interface of `Attention`.

    The cache stores [latent | rotated key] as one KV head of C + R numbers.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        if config.latent_dim is None:
            raise ValueError("latent attention needs a latent_dim")
        E, H, D = config.hidden_size, config.num_heads, config.head_dim
        C, R = config.latent_dim, config.rope_dim
        self.layer, self.window = layer, config.window(layer)
        self.num_heads, self.head_dim, self.latent_dim, self.rope_dim = H, D, C, R
        self.q = nn.Linear(E, H * (D + R), bias=False)
        self.kv_down = nn.Linear(E, C + R, bias=False)
        self.kv_norm = make_norm(config, C)
        self.k_up = nn.Linear(C, H * D, bias=False)  # W_k of all heads
        self.v_up = nn.Linear(C, H * D, bias=False)
        self.o = nn.Linear(H * D, E, bias=False)
        self.scale = (D + R) ** -0.5

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None) -> Tensor:
        B, T, _ = x.shape
        H, D, C, R = self.num_heads, self.head_dim, self.latent_dim, self.rope_dim
        heads = self.q(x).view(B, T, H, D + R).transpose(1, 2)
        plain, rotating = heads.split((D, R), -1)  # [B, H, T, D], [B, H, T, R]
        absorbed = torch.einsum("bhtd,hdc->bhtc", plain, self.k_up.weight.view(H, D, C))
        queries = torch.cat((absorbed, rotate(rotating, cos, sin)), -1)  # [B, H, T, C + R]
        latent, key = self.kv_down(x).split((C, R), -1)
        latent = self.kv_norm(latent)[:, None]  # [B, 1, T, C]
        keys = torch.cat((latent, rotate(key[:, None], cos, sin)), -1)  # [B, 1, T, C + R]
        if cache is None:
            out = causal_attention(queries, keys, latent, self.window, self.scale)
        else:
            cache.append(self.layer, keys, latent)
            out = cache.attend(self.layer, queries, self.scale)  # [B, H, T, C]
        values = torch.einsum("bhtc,hdc->bthd", out, self.v_up.weight.view(H, D, C))
        return self.o(values.reshape(B, T, H * D))  # [B, T, E]
