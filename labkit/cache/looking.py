"""Looking into a cache: the keys that it holds, as numbers, and where the newest queries' attention goes.

    weights[h, s] = softmax over s of (q_h . k_s) / sqrt(D)        k as the cache holds it, packed or not

For pictures, not for models: all keys of a layer are decoded at once, which attention itself never does. `Watched` passes
everything on to a cache and keeps the queries of the last forward pass, so that nothing has to be run twice.
When it loses: keys stored before RoPE are shown before RoPE, so their weights are refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.cache.contiguous import ContiguousCache
from labkit.cache.contract import KVCache
from labkit.cache.evicting import EvictingCache
from labkit.cache.packed_blocks import decode
from labkit.cache.quantized import QuantizedCache
from labkit.cache.ring import positions_of
from labkit.cache.step import visible
from labkit.cache.window import WindowedCache
from labkit.errors import BadRequest, whole_number


def held_keys(cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
    """Keys [B, K, S, D] in float32 as `cache` holds them, and the position of each slot [B, S] (2**62: empty)."""
    if not 0 <= whole_number(layer, "layer") < cache.shape.num_layers:
        raise BadRequest(f"There is no layer {layer}; this cache has layers 0 to {cache.shape.num_layers - 1}.")
    spec = cache.shape.layers[layer]
    if spec.latent_dim is not None or spec.shared_with is not None:
        raise BadRequest(f"Layer {layer} holds a latent or another layer's keys; look at a layer with keys of its own.")
    if isinstance(cache, QuantizedCache) and cache.frequencies is not None:
        raise BadRequest("These keys are stored before RoPE; look at a format that quantises them after it.")
    if cache.length == 0:
        raise BadRequest("The cache holds no tokens yet; pass some through the model first.")
    if isinstance(cache, QuantizedCache):
        return _packed_keys(cache, layer)
    if isinstance(cache, EvictingCache):
        return cache.keys[layer].float(), cache.positions[layer]
    lengths = torch.tensor(cache.lengths, device=cache.device)
    if isinstance(cache, WindowedCache) and spec.window is not None:
        keys = cache.keys[layer][:, :, : cache.length]
        return keys.float(), positions_of(lengths, keys.shape[2], spec.sinks, cache._ring(layer))
    if isinstance(cache, ContiguousCache | WindowedCache):
        keys = cache.keys[layer][:, :, : cache.length]
        return keys.float(), torch.arange(cache.length, device=cache.device).expand(cache.batch, -1)
    raise BadRequest(f"A {type(cache).__name__} does not show its keys; give `held_keys` a case for it.")


def _packed_keys(cache: QuantizedCache, layer: int) -> tuple[Tensor, Tensor]:
    slots = max(bulk.slots for bulk in cache.bulks)
    tail = max(length - bulk.tokens for length, bulk in zip(cache.lengths, cache.bulks))
    held, part = cache.packed[layer][0], cache.format.keys
    per = {name: cache.slots // t.shape[2] for name, t in held.items()}
    used = {name: t[:, :, : slots // per[name]] for name, t in held.items()}
    packed = decode(used, part, cache.shape.layers[layer].head_dim)
    positions, _ = cache._view(slots, tail, None, 0)
    dense = cache.tails[layer][0][:, :, :tail].float()
    return torch.cat([packed, dense], 2), positions.expand(cache.batch, -1)


def last_weights(cache: KVCache, layer: int, queries: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Attention of each row's newest token, weights [B, H, S] and positions [B, S], from the queries [B, H, T, D] of the
    pass that came last."""
    keys, positions = held_keys(cache, layer)
    (B, H, _, D), K, spec = queries.shape, keys.shape[1], cache.shape.layers[layer]
    last = torch.tensor([max(count - 1, 0) for count in cache.step.counts], device=cache.device)
    row = torch.arange(B, device=cache.device)
    q = queries[row, :, last].float().reshape(B, K, H // K, D) * (D**-0.5 if scale is None else scale)
    seen = visible(cache.step.positions[row, last][:, None], positions, spec.window, spec.sinks)  # [B, 1, S]
    scores = (q @ keys.mT).masked_fill(~seen[:, None], torch.finfo(torch.float32).min)
    return scores.softmax(-1).reshape(B, H, -1), positions


class Watched:
    """A cache that remembers the queries of the last pass, layer by layer."""

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
            raise BadRequest(f"No queries of layer {layer} were seen; pass some tokens through a model that has it first.")
        return last_weights(self.cache, layer, self.queries[layer], self.scales[layer])
