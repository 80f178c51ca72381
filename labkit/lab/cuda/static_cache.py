"""A KV cache whose decode steps have the same shapes at every length.

A CUDA graph replays recorded work, so the work must not depend on a number that only
Python has. Inside `fixed`, the length of each row is therefore a number on the device
(`at`). The new key goes into slot `at`, and attention reads the first `span` slots with
the mask slot <= at. Outside `fixed` the cache is a contiguous cache whose slots are all
allocated.

    bytes read per step = rows * span * bytes per token    (span >= the longest row)

When it loses: without a graph. Each step also reads the span - length empty slots after
the last token, and attention needs a mask. A contiguous cache needs neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from labkit.cache.contiguous import ContiguousCache
from labkit.errors import BadRequest


class StaticCache(ContiguousCache):
    """A contiguous cache of `capacity` tokens per row, all allocated.

    In `fixed` steps every row gets exactly one token. Raises BadRequest without a
    capacity.
    """

    stores_latents = shares_layers = False

    def __init__(self, *sizes: Any, **named: Any):
        super().__init__(*sizes, **named)
        if self.capacity is None:
            raise BadRequest("capacity is None; give the maximum number of tokens per row.")
        if self.slots < self.capacity:
            self._allocate(self.capacity)
        with torch.inference_mode(False):  # the slot of the next token, per row
            self.at = torch.zeros(self.batch, dtype=torch.long, device=self.device)
        self.span: int | None = None  # None: outside `fixed`

    @contextmanager
    def fixed(self, span: int) -> Iterator[None]:
        """Make each step in this block read `span` slots.

        The caller adds 1 to `at` after each step, and calls `count` after the block.
        """
        self.at.copy_(torch.tensor(self.lengths, device=self.device))
        self.span = span
        try:
            yield
        finally:
            self.span = None

    def count(self, steps: int) -> None:
        """Add the number of fixed steps to the length of each row."""
        self.lengths = tuple(length + steps for length in self.lengths)

    def in_memory(self) -> None:
        """Return None, because in fixed steps the length is a number on the device."""

    def advance(self, num_tokens: int, counts: Sequence[int] | None = None) -> Tensor:
        if self.span is None:
            return super().advance(num_tokens, counts)
        self._masks: dict[tuple[int | None, int], Tensor] = {}
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
        keys, values = self.keys[layer][:, :, : self.span], self.values[layer][:, :, : self.span]
        # The query heads of a KV head take the place of tokens.
        folded = queries.reshape(B, spec.num_kv_heads, H // spec.num_kv_heads, D)
        mask = self._visible(spec.window, spec.sinks)
        out = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(B, H, 1, -1)

    def _visible(self, window: int | None, sinks: int) -> Tensor:
        """Return the mask [B, 1, 1, span]; it is made once per step and kind of layer."""
        if (window, sinks) not in self._masks:
            slot, at = torch.arange(self.span, device=self.device), self.at[:, None]
            seen = slot <= at
            if window is not None:
                seen = seen & ((slot > at - window) | (slot < sinks))
            self._masks[window, sinks] = seen[:, None, None]
        return self._masks[window, sinks]
