"""One forward pass as a cache sees it: which tokens are new, at which positions, who may see whom.

Every cache makes one `Step` in `advance` and uses it in all layers, so whatever does not depend on the
layer (positions, masks, scatter indices) is worked out once a forward pass. Visibility is decided by
*positions* alone: the query at position p sees the key at position s when

    s <= p   and   (s > p - window   or   s < sinks)

A "causal" flag says the same only when the cache is empty: it aligns to the top left, so with more keys
than queries the new tokens would lose their history. Cost: a mask is [B, 1, T, S] numbers, once a pass;
the common decode step (one token, rows of equal length) needs none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

FOLDED_QUERIES = 32  # up to here the G queries of a KV head are folded beside the T tokens


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None = None, sinks: int = 0) -> Tensor:
    """The rule above as booleans: positions [B, T] and [B, S] (or [1, S]) -> [B, T, S]."""
    query, key = query_positions[:, :, None], key_positions[:, None, :]
    seen = key <= query
    if window is not None:
        seen = seen & ((key > query - window) | (key < sinks))
    return seen


@dataclass
class Step:
    """T new tokens a row, of which `counts[b]` are real; row b already held `starts[b]` tokens."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    num_tokens: int
    device: torch.device
    positions: Tensor = field(init=False)  # [B, T]; padding repeats the row's last real position
    _masks: dict = field(init=False, default_factory=dict)
    _scatter: tuple | None = field(init=False, default=None)

    def __post_init__(self):
        first, width = self.starts[0], self.num_tokens
        self.length = max(start + count for start, count in zip(self.starts, self.counts))
        self.aligned = len(self.starts) == 1 or all(start == first for start in self.starts)
        self.full = all(count == width for count in self.counts)
        self.uniform = self.aligned and self.full  # every row has the same positions
        if self.uniform:
            row = torch.arange(first, first + width, device=self.device)
            self.positions = row.expand(len(self.starts), width)
        else:
            starts = torch.tensor(self.starts, device=self.device)[:, None]
            last = torch.tensor([max(count - 1, 0) for count in self.counts], device=self.device)[:, None]
            self.positions = starts + torch.minimum(torch.arange(width, device=self.device)[None], last)

    def scatter(self) -> tuple[Tensor, Tensor, Tensor]:
        """Indices (row, token of this pass, position) of the N real tokens, row by row; each [N]."""
        if self._scatter is None:
            triples = [
                (row, token, start + token)
                for row, (start, count) in enumerate(zip(self.starts, self.counts))
                for token in range(count)
            ]
            self._scatter = torch.tensor(triples, device=self.device).unbind(1)
        return self._scatter

    def mask(self, key_positions: Tensor, name: object, dtype: torch.dtype, window=None, sinks=0, queries=1, heads=1):
        """0 where visible, -inf elsewhere: [B * heads, 1, queries * T, S]; remembered under `name` unless None."""
        memo = (name, window, sinks, dtype, queries, heads)
        if memo in self._masks:
            return self._masks[memo]
        seen = visible(self.positions, key_positions, window, sinks)  # [B, T, S]
        bias = torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, float("-inf"))
        bias = bias.repeat(1, queries, 1).repeat_interleave(heads, dim=0)[:, None]
        if name is not None:
            self._masks[memo] = bias
        return bias


def attend_dense(
    step: Step,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    key_positions: Tensor | None = None,
    name: object = None,
) -> Tensor:
    """Attention of this step's queries [B, H, T, D] over dense keys and values [B, K, S, D].

    Slot s holds position s unless `key_positions` [B, S] says otherwise; layers that share those give the same
    `name`, and the mask is made once. Keys and values are never repeated for grouped queries: the G = H / K
    query heads of a KV head become G times the queries, or G views of it.
    """
    B, H, T, D = queries.shape
    K, S = keys.shape[1:3]
    G = H // K
    by_slot = key_positions is None
    if by_slot and T == 1 and step.uniform and window is not None and sinks == 0 and window < S:
        keys, values = keys[:, :, S - window :], values[:, :, S - window :]  # the band is a slice
        S, window = window, None
    if by_slot and (window is None or window >= S):
        window = None
        if T == 1 and step.uniform:  # the newest token sees all there is
            folded = queries.view(B, K, G, D)
            return scaled_dot_product_attention(folded, keys, values, scale=scale).view(B, H, 1, -1)
        if step.aligned and step.starts[0] == 0:  # empty cache: here the flag is the rule
            return _by_views(queries, keys, values, K, G, None, True, scale)
    if by_slot:
        key_positions, name = torch.arange(S, device=queries.device)[None], ("slots", S)
    if T * G <= FOLDED_QUERIES:
        bias = step.mask(key_positions, name, queries.dtype, window, sinks, queries=G)
        folded = queries.reshape(B, K, G * T, D)
        return scaled_dot_product_attention(folded, keys, values, attn_mask=bias, scale=scale).reshape(B, H, T, -1)
    bias = step.mask(key_positions, name, queries.dtype, window, sinks, heads=K if B > 1 else 1)
    return _by_views(queries, keys, values, K, G, bias, False, scale)


def _by_views(queries, keys, values, K, G, bias, causal, scale):
    """KV heads become batch rows, and each is seen G times through a stride of zero: no copy."""
    B, H, T, D = queries.shape
    S = keys.shape[2]
    grouped = queries.reshape(B * K, G, T, D)
    keys = keys.reshape(B * K, 1, S, D).expand(B * K, G, S, D)
    values = values.reshape(B * K, 1, S, -1).expand(B * K, G, S, -1)  # MLA: narrower than the keys
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, is_causal=causal, scale=scale)
    return out.reshape(B, H, T, -1)
