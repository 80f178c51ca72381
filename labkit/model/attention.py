"""Attention: which earlier tokens matter for this one, and what they say.

`softmax(Q Kᵀ / sqrt(D)) V` per head (Vaswani et al. 2017), where H query heads share K key/value heads, so that
query head h reads KV head h // (H/K) (GQA, Ainslie et al. 2023; K = H is MHA, K = 1 is MQA).
Keys are rotated before they are cached; who may see whom is the cache's business, decided by positions.
Without a cache the whole text is passed each time and the mask is plainly causal (a band where the layer has a window).
Cost: 2·E·(H+2K)·D + 2·E·H·D operations a token for the projections and 4·H·D per token and token seen for the rest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.model.config import ModelConfig
from labkit.model.norm import make_norm
from labkit.model.rope import rotate


class Attention(nn.Module):
    """One layer's attention: `forward(x [B, T, E], cos, sin, cache) -> [B, T, E]`; cos and sin from `Rotary`."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.window = layer, config.window(layer)
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        # One projection for q, k and v: fewer operators a step, and formats that work by rows are not affected.
        # A layer that reads another's keys and values has rows for q alone.
        self.shares = config.shared_with(layer) is not None
        rows = config.q_size + (0 if self.shares else 2 * config.kv_size)
        self.qkv = nn.Linear(config.hidden_size, rows, bias=config.qkv_bias)
        self.o = nn.Linear(config.q_size, config.hidden_size, bias=config.o_bias)
        self.q_norm = make_norm(config, config.head_dim) if config.qk_norm else None
        self.k_norm = make_norm(config, config.head_dim) if config.qk_norm and not self.shares else None
        self.scale = config.attention_scale  # None: 1 / sqrt(head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache=None) -> Tensor:
        B, T, _ = x.shape
        H, K = self.num_heads, self.num_kv_heads
        if self.shares:
            queries = self.qkv(x).view(B, T, H, self.head_dim).transpose(1, 2)  # [B, H, T, D]
            queries = rotate(queries if self.q_norm is None else self.q_norm(queries), cos, sin)
            out = cache.attend(self.layer, queries, self.scale)
            return self.o(out.transpose(1, 2).reshape(B, T, H * self.head_dim))
        heads = self.qkv(x).view(B, T, H + 2 * K, self.head_dim).transpose(1, 2)  # [B, H+2K, T, D]
        if self.q_norm is None:
            turned = rotate(heads[:, : H + K], cos, sin)  # queries and keys at once
            queries, keys = turned[:, :H], turned[:, H:]
        else:
            queries = rotate(self.q_norm(heads[:, :H]), cos, sin)
            keys = rotate(self.k_norm(heads[:, H : H + K]), cos, sin)
        values = heads[:, H + K :]  # [B, K, T, D]
        if cache is None:
            out = causal_attention(queries, keys, values, self.window, self.scale)
        else:
            cache.append(self.layer, keys, values)
            out = cache.attend(self.layer, queries, self.scale)
        return self.o(out.transpose(1, 2).reshape(B, T, H * self.head_dim))  # [B, T, E]


def causal_attention(
    queries: Tensor, keys: Tensor, values: Tensor, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Every token sees itself and what is before it, the last `window` tokens where one is given. [B, H, T, D]

    Right padding needs no mask here: a real token never looks to its right, and what padding computes is never read."""
    T = queries.shape[2]
    gqa = queries.shape[1] != keys.shape[1]
    if window is None or window >= T:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=gqa, scale=scale)
    distance = torch.arange(T, device=queries.device)[:, None] - torch.arange(T, device=queries.device)
    band = (distance >= 0) & (distance < window)  # [T, T]
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=band, enable_gqa=gqa, scale=scale)
