"""Attention, the plain way: the oracle that every faster path is held to.

    out[t] = sum over s of softmax over s of (q[t] . k[s] * scale) * v[s],   over the keys that t may see

The query at position p sees the key at position s when s <= p, within `window` (s > p - window) or among the
first `sinks` positions. Query head h reads KV head h // (H / K): each KV head serves G = H / K neighbouring
query heads. Scores are [B, H, T, S] in full and in float32 at least, so this costs memory quadratic in length.
Source: Vaswani et al., "Attention is all you need", 2017; grouped queries: Ainslie et al., "GQA", 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
    key_valid: Tensor | None = None,
) -> Tensor:
    """q [B, H, T, D], k and v [B, K, S, D], positions [T] or [B, T] and [S] or [B, S] -> [B, H, T, D] in q's dtype.

    `key_valid` [B, S] marks slots that hold a key at all. A query that sees no key gets zeros.
    """
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    precise = torch.promote_types(q.dtype, torch.float32)
    kv_head = torch.arange(H, device=q.device) // (H // K)  # [H]
    keys, values = k.to(precise)[:, kv_head], v.to(precise)[:, kv_head]  # [B, H, S, D]

    p = query_positions.reshape(-1, T, 1)
    s = key_positions.reshape(-1, 1, S)
    seen = s <= p
    if window is not None:
        seen = seen & ((s > p - window) | (s < sinks))
    seen = seen.expand(B, T, S)
    if key_valid is not None:
        seen = seen & key_valid[:, None, :]
    seen = seen[:, None]  # [B, 1, T, S]

    scores = q.to(precise) @ keys.transpose(-1, -2) * (D**-0.5 if scale is None else scale)  # [B, H, T, S]
    scores = scores.masked_fill(~seen, float("-inf"))
    largest = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (scores - largest).exp()
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(precise).tiny)
    values = torch.where(seen.any(2)[..., None], values, 0.0)  # 0 * NaN of a key nobody sees would be NaN
    return (weights @ values).to(q.dtype)
