"""Describe one forward pass to a cache: the new tokens and the keys that each may see.

A cache makes one `Step` in `advance` and uses it in all layers, so positions, masks and
scatter indices are computed once per forward pass. Visibility depends only on
positions. The query at position p sees the key at position s if

    s <= p   and   (s > p - window   or   s < sinks)

A "causal" flag gives the same result only if the cache is empty. It aligns queries and
keys at the first token, so new tokens would not see the cached ones. Cost: a mask has
B * T * S numbers and is made once per pass. The usual decode step (one token, rows of
equal length) needs no mask.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from labkit.plan.kv import LayerKV

NOWHERE = 2**62  # the position of an empty slot: no query sees it
Band = tuple[int | None, int]  # window (None: no window) and sinks
FOLDED_QUERIES = 32  # up to this number of queries, G heads and T tokens share one axis


class Slots(NamedTuple):
    """The position of each slot, for a cache whose slot s may store another position.

    Layers with equal positions use the same `name`, so they share one mask.
    """

    positions: Tensor  # [B, S]
    name: Hashable | None = None


def visible(queries: Tensor, keys: Tensor, window: int | None = None, sinks: int = 0) -> Tensor:
    """Apply the rule above to positions [B, T] and [B or 1, S]: booleans [B, T, S]."""
    query, key = queries[:, :, None], keys[:, None, :]
    seen = key <= query
    return seen if window is None else seen & ((key > query - window) | (key < sinks))


@dataclass
class Step:
    """T new tokens per row, of which `counts[b]` are real.

    Row b already has `starts[b]` tokens. `positions` [B, T] repeats a row's last real
    position in its padding.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    num_tokens: int
    device: torch.device

    def __post_init__(self) -> None:
        first, width = self.starts[0], self.num_tokens
        self.length = max(map(int.__add__, self.starts, self.counts))
        self.aligned = len(self.starts) == 1 or all(start == first for start in self.starts)
        self.full = all(count == width for count in self.counts)
        self.uniform = self.aligned and self.full  # every row has the same positions
        self._masks: dict[Hashable, Tensor] = {}
        if self.uniform:
            row = torch.arange(first, first + width, device=self.device)
            self.positions = row.expand(len(self.starts), width)
        else:
            starts, counts = (self.per_row(numbers) for numbers in (self.starts, self.counts))
            token = torch.arange(width, device=self.device)[None]
            self.positions = starts + torch.minimum(token, (counts - 1).clamp(min=0))

    def per_row(self, numbers: tuple[int, ...]) -> Tensor:
        """Return one number per row as a tensor [B, 1]."""
        return torch.tensor(numbers, device=self.device)[:, None]

    def real(self) -> Tensor:
        """Return booleans [B, T]: True for tokens that are not padding."""
        return torch.arange(self.num_tokens, device=self.device) < self.per_row(self.counts)

    @cached_property
    def scatter(self) -> tuple[Tensor, ...]:
        """Row, token of this pass and position of the N real tokens: [N] each."""
        triples = [
            (row, token, start + token)
            for row, (start, count) in enumerate(zip(self.starts, self.counts))
            for token in range(count)
        ]
        return torch.tensor(triples, device=self.device).unbind(1)

    def mask(
        self, slots: Slots, dtype: torch.dtype, band: Band, queries: int = 1, heads: int = 1
    ) -> Tensor:
        """Return a mask [B * heads, 1, queries * T, S]: 0 if visible, -inf if not."""
        key = (slots.name, band, dtype, queries, heads)
        if key in self._masks:
            return self._masks[key]
        hidden = ~visible(self.positions, slots.positions, *band)  # [B, T, S]
        bias = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
        bias = bias.masked_fill_(hidden, float("-inf"))
        bias = bias.repeat(1, queries, 1).repeat_interleave(heads, dim=0)[:, None]
        if slots.name is not None:
            self._masks[key] = bias
        return bias


def attend_dense(
    step: Step,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None = None,
    layer: LayerKV | None = None,
    slots: Slots | None = None,
) -> Tensor:
    """Compute attention [B, H, T, D] of this step's queries over dense [B, K, S, D].

    `layer` supplies window and sinks (None: no window). Slot s stores position s unless
    `slots` gives other positions. Keys and values are never repeated for grouped
    queries. Instead, the G = H / K query heads of a KV head become G times the queries,
    or G views of the keys.
    """
    B, H, T, D = queries.shape
    K, S = keys.shape[1:3]
    G = H // K
    window, sinks = (None, 0) if layer is None else (layer.window, layer.sinks)
    causal = False  # whether PyTorch's causal flag is exact
    if slots is None:
        if T == 1 and step.uniform and window is not None and sinks == 0 and window < S:
            keys, values = keys[:, :, S - window :], values[:, :, S - window :]  # only the band
            S, window = window, None
        if window is None or window >= S:
            window = None
            if T == 1 and step.uniform:  # the newest token sees everything
                out = sdpa(queries.view(B, K, G, D), keys, values, scale=scale)
                return out.view(B, H, 1, -1)
            causal = step.aligned and step.starts[0] == 0  # the cache was empty
        slots = Slots(torch.arange(S, device=queries.device)[None], ("slots", S))
    bias, band = None, (window, sinks)
    if not causal and T * G <= FOLDED_QUERIES:
        bias = step.mask(slots, queries.dtype, band, queries=G)
        folded = queries.reshape(B, K, G * T, D)
        return sdpa(folded, keys, values, attn_mask=bias, scale=scale).reshape(B, H, T, -1)
    if not causal:
        bias = step.mask(slots, queries.dtype, band, heads=K if B > 1 else 1)
    # Each KV head becomes a batch row, and G query heads see it without a copy.
    grouped = queries.reshape(B * K, G, T, D)
    keys = keys.reshape(B * K, 1, S, D).expand(B * K, G, S, D)
    values = values.reshape(B * K, 1, S, -1).expand(B * K, G, S, -1)  # MLA: narrower than the keys
    out = sdpa(grouped, keys, values, attn_mask=bias, is_causal=causal, scale=scale)
    return out.reshape(B, H, T, -1)
