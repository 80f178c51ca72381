"""Compute the attention of the newest queries from the keys in a cache.

    weights[h, s] = softmax over s of (q_h . k_s) / sqrt(D)

The keys k are as the cache stores them, packed or not. This is for pictures: `cached_keys`
decodes all keys of a layer at once, which attention itself never does. `Watched` wraps a cache
and keeps the queries of the last forward pass, so nothing runs twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.cache.contract import KVCache
from labkit.cache.forward_pass import visible
from labkit.errors import BadRequest


def last_weights(
    cache: KVCache, layer: int, queries: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention of each row's newest token: weights [B, H, S] and positions [B, S].

    `queries` [B, H, T, D] are those of the last pass.
    """
    keys, positions = cache.cached_keys(layer)
    (B, H, _, D), K, spec = queries.shape, keys.shape[1], cache.shape.layers[layer]
    last = torch.tensor([max(count - 1, 0) for count in cache.step.counts], device=cache.device)
    row = torch.arange(B, device=cache.device)
    q = queries[row, :, last].float().reshape(B, K, H // K, D) * (
        D**-0.5 if scale is None else scale
    )
    seen = visible(
        cache.step.positions[row, last][:, None], positions, spec.window, spec.sinks
    )  # [B, 1, S]
    scores = (q @ keys.mT).masked_fill(~seen[:, None], torch.finfo(torch.float32).min)
    return scores.softmax(-1).reshape(B, H, -1), positions


class Watched:
    """A cache that stores the queries of the last pass for each layer."""

    def __init__(self, cache: KVCache):
        self.cache, self.queries, self.scales = cache, {}, {}

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.cache.lengths

    def advance(self, num_tokens: int, counts=None) -> Tensor:
        return self.cache.advance(num_tokens, counts)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.cache.append(layer, keys, values)

    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        self.queries[layer], self.scales[layer] = queries, scale
        return self.cache.attend(layer, queries, scale)

    def weights(self, layer: int) -> tuple[Tensor, Tensor]:
        if layer not in self.queries:
            raise BadRequest(
                f"Layer {layer} has no queries yet; run the model on some tokens first."
            )
        return last_weights(self.cache, layer, self.queries[layer], self.scales[layer])
