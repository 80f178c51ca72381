"""Attention with grouped heads, with and without a cache.

Each head computes `softmax(Q K^T / sqrt(D)) V` (Vaswani et al. 2017). H query heads share K
key/value heads: query head h reads KV head h // (H/K). This is GQA (Ainslie et al. 2023).
With K = H it is MHA, with K = 1 it is MQA.

Keys are rotated before they are cached. The cache uses positions to decide which tokens a
query attends to. Without a cache, each call gets the whole text, and the mask is causal (a
band if the layer has a window).

Cost: the projections need 2·E·(H+2K)·D + 2·E·H·D operations per token. Attention needs
4·H·D operations per query and token that it attends to.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.cache.contract import KVCache
from labkit.model.config import ModelConfig
from labkit.model.norm_mlp import make_norm
from labkit.model.rope import rotate


class Attention(nn.Module):
    """The attention of one layer: `forward(x [B, T, E], cos, sin, cache) -> [B, T, E]`.

    `cos` and `sin` come from `Rotary`.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.window = layer, config.window(layer)
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        # One projection for q, k and v needs fewer operators per step. A layer that reads the
        # keys and values of another layer has only rows for q.
        self.shares = config.shared_with(layer) is not None
        rows = config.q_size + (0 if self.shares else 2 * config.kv_size)
        self.qkv = nn.Linear(config.hidden_size, rows, bias=config.qkv_bias)
        self.o = nn.Linear(config.q_size, config.hidden_size, bias=config.o_bias)
        normed = config.qk_norm
        self.q_norm = make_norm(config, self.head_dim) if normed else None
        self.k_norm = make_norm(config, self.head_dim) if normed and not self.shares else None
        self.scale = config.attention_scale  # None: 1 / sqrt(head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None) -> Tensor:
        B, T, _ = x.shape
        H, K = self.num_heads, self.num_kv_heads
        heads = self.qkv(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # [B, H+2K, T, D]
        if self.shares:
            queries = rotate(heads if self.q_norm is None else self.q_norm(heads), cos, sin)
        elif self.q_norm is None or self.k_norm is None:
            rotated = rotate(heads[:, : H + K], cos, sin)  # queries and keys in one call
            queries, keys = rotated[:, :H], rotated[:, H:]
        else:
            queries = rotate(self.q_norm(heads[:, :H]), cos, sin)
            keys = rotate(self.k_norm(heads[:, H : H + K]), cos, sin)
        if cache is None:
            out = causal_attention(queries, keys, heads[:, H + K :], self.window, self.scale)
        else:
            if not self.shares:
                cache.append(self.layer, keys, heads[:, H + K :])  # keys and values [B, K, T, D]
            out = cache.attend(self.layer, queries, self.scale)  # [B, H, T, D]
        return self.o(out.transpose(1, 2).reshape(B, T, H * self.head_dim))  # [B, T, E]


def causal_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return causal attention [B, H, T, D] over all earlier tokens, or the last `window`.

    Right padding needs no mask: a token attends only to its left, and nothing reads the
    results of padding.
    """
    T, band = queries.shape[2], None
    if window is not None and window < T:
        positions = torch.arange(T, device=queries.device)
        distance = positions[:, None] - positions
        band = (distance >= 0) & (distance < window)  # [T, T]
    return F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=band,
        is_causal=band is None,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
