"""Compute attention in the plain way; tests compare every faster path with it.

    out[t] = sum over the keys s that t may see of softmax(q[t] . k[s] / sqrt(D)) * v[s]

The query at position p sees the key at position s if s <= p, and s is within `window`
(s > p - window) or among the first `sinks` positions. Query head h reads KV head h //
(H / K), so each KV head serves G = H / K neighbouring query heads. All scores [B, H, T,
S] are in memory, in float32 or wider, so memory is quadratic in the length. Sources:
Vaswani et al., "Attention is all you need", 2017; grouped queries: Ainslie et al.,
"GQA", 2023.
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
) -> Tensor:
    """Compute q [B, H, T, D], k and v [B, K, S, D] -> [B, H, T, D] in q's dtype.

    Positions are [T] or [B, T] and [S] or [B, S]. Give a slot without a key a position
    after all queries. The result of a query that sees no key is zero. For a scale other
    than 1 / sqrt(D), scale q first.
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
    seen = seen.expand(B, T, S)[:, None]  # [B, 1, T, S]

    scores = q.to(precise) @ keys.transpose(-1, -2) * D**-0.5  # [B, H, T, S]
    scores = scores.masked_fill(~seen, float("-inf"))
    largest = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (scores - largest).exp()
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(precise).tiny)
    # A key that no query sees may be NaN, and 0 * NaN is NaN.
    values = torch.where(seen.any(2)[..., None], values, 0.0)
    return (weights @ values).to(q.dtype)
