"""The static cache: a contiguous one whose decode step has the same shapes, addresses and operators at every length.

A CUDA graph replays recorded work: nothing in it may depend on a number that only Python knows. So, between `fixed` and its
end, the length of each row is a number on the device (`at`): the new key goes to slot `at`, and attention runs over
the first `span` slots with a mask slot <= at. Outside of `fixed` it is a contiguous cache with all slots allocated.

    bytes read a step = rows * span * the bytes of a token       span: what the caller fixes, at least the longest row
When it loses: slots beyond the length are read for nothing, up to span - length of them; without a graph around it the
mask is work that a contiguous cache does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from labkit.cache.contiguous import ContiguousCache
from labkit.errors import BadRequest
from labkit.plan.memory import KVShape


class StaticCache(ContiguousCache):
    """`capacity` tokens a row, all allocated. In `fixed` steps every row gets exactly one token."""

    def __init__(self, shape: KVShape, batch: int = 1, capacity: int | None = None,
                 dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"):  # fmt: skip
        if capacity is None:
            raise BadRequest("A static cache has no capacity; give the most tokens a row may hold, since all are allocated.")
        if any(layer.latent_dim is not None or layer.shared_with is not None for layer in shape.layers):
            raise BadRequest("A static cache has no latent and no shared layers; use the contiguous cache for this model.")
        super().__init__(shape, batch, capacity, dtype, device)
        if self.slots < self.capacity:
            self._allocate(self.capacity)
        with torch.inference_mode(False):
            self.at = torch.zeros(batch, dtype=torch.long, device=self.device)  # where the next token goes
        self.span: int | None = None  # None: not in fixed steps
        self._seen: dict = {}

    @contextmanager
    def fixed(self, span: int) -> Iterator[None]:
        """Steps inside read `span` slots; the caller moves `at` on, and tells `count` afterwards how many there were."""
        self.at.copy_(torch.tensor(self.lengths, device=self.device))
        self.span = span
        try:
            yield
        finally:
            self.span = None

    def count(self, steps: int) -> None:
        """So many fixed steps have been run."""
        self.lengths = tuple(length + steps for length in self.lengths)

    def advance(self, num_tokens: int, counts=None) -> Tensor:
        if self.span is None:
            return super().advance(num_tokens, counts)
        if num_tokens != 1 or counts is not None:
            raise BadRequest(f"A fixed step takes one token a row, not {num_tokens} with counts {counts}.")
        self._seen = {}
        return self.at[:, None]  # [B, 1]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if self.span is None:
            return super().append(layer, keys, values)
        index = self.at[:, None, None, None].expand(keys.shape)  # [B, K, 1, D]
        self.keys[layer].scatter_(2, index, keys.to(self.dtype))
        self.values[layer].scatter_(2, index, values.to(self.dtype))

    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        if self.span is None:
            return super().attend(layer, queries, scale)
        spec, (B, H, _, D) = self.shape.layers[layer], queries.shape
        K = spec.num_kv_heads
        keys, values = self.keys[layer][:, :, : self.span], self.values[layer][:, :, : self.span]
        folded = queries.reshape(B, K, H // K, D)  # the query heads of a KV head side by side, as if they were tokens
        out = scaled_dot_product_attention(folded, keys, values, attn_mask=self._visible(spec.window, spec.sinks), scale=scale)
        return out.reshape(B, H, 1, -1)

    def _visible(self, window: int | None, sinks: int) -> Tensor:
        """[B, 1, 1, span]: once a step for each kind of layer."""
        if (window, sinks) not in self._seen:
            slot, at = torch.arange(self.span, device=self.device), self.at[:, None]
            seen = slot <= at
            if window is not None:
                seen = seen & ((slot > at - window) | (slot < sinks))
            self._seen[window, sinks] = seen[:, None, None]
        return self._seen[window, sinks]
