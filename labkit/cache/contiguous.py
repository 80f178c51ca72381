"""Cache keys and values in one block per layer; slot s stores position s.

A decode step computes one token instead of the whole text. In return, each step reads
the cache: 2 * K * D numbers per cached token and layer.

    bytes = rows * slots * sum over layers of (2 * K * D) * bytes of a number

The number of slots doubles when they run out, up to `capacity`. While a cache grows,
the old and the new block both exist.

When it loses: rows of very different length, because each takes as much memory as the
longest (see the paged cache). It also loses for very short texts, which cost as much to
read as to recompute.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.cache.contract import InMemory, KVCache, doubled, stored
from labkit.cache.forward_pass import Step, attend_dense
from labkit.kernels import huge_pages
from labkit.plan.kv import KVShape


class ContiguousCache(KVCache):
    """Dense keys and values [B, K, slots, D] per layer.

    Windows are masked, not dropped.
    """

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.check_own(layer)
        step, start = self.step, self.step.starts[0]
        for side, new in ((self.keys, keys), (self.values, values)):
            if side[layer] is None:  # MLA: the values are a part of the keys
                continue
            if step.uniform:
                side[layer][:, :, start : start + step.num_tokens] = new  # [B, K, T, D]
            else:  # rows of unequal length, without their padding
                rows, tokens, slots = step.scatter  # [N] each
                side[layer][rows, :, slots] = new[rows, :, tokens].to(self.dtype)  # [N, K, D]

    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        keys, values = self._cached(layer)  # [B, K, S, D], all tokens so far
        return attend_dense(self.step, queries, keys, values, scale, self.shape.layers[layer])

    def __init__(self, *sizes: Any, **named: Any):
        super().__init__(*sizes, **named)
        self.keys: list[Any] = [None] * self.shape.num_layers  # None: the layer stores nothing
        self.values: list[Any] = [None] * self.shape.num_layers  # None: the layer stores a latent
        self._allocate(1)

    def _cached(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values that a layer reads."""
        home, latent = self.shape.home[layer], self.shape.layers[layer].latent_dim
        keys = self.keys[home][:, :, : self.step.length]
        if latent is not None:
            return keys, keys[..., :latent]
        return keys, self.values[home][:, :, : self.step.length]

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (*self.keys, *self.values) if tensor is not None]

    def nbytes_used(self) -> int:
        return sum(self.lengths) * sum(tensor[0, :, 0].nbytes for tensor in self.tensors())

    def _layout(self) -> InMemory | None:
        kind = {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(self.dtype)
        sides = ([{"numbers": tensor} for tensor in side] for side in (self.keys, self.values))
        return None if kind is None else InMemory(kind, self.slots, *sides)

    def of_layers(self, layers: Sequence[int]) -> ContiguousCache:
        """Return a view of some layers: the same tensors, with separate lengths."""
        view = copy.copy(self)
        view.shape = KVShape(tuple(self.shape.layers[i] for i in layers))
        view.keys, view.values = ([side[i] for i in layers] for side in (self.keys, self.values))
        view._in_memory = None
        return view

    def _cached_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(self.length, device=self.device).expand(self.batch, -1)
        return self.keys[layer][:, :, : self.length].float(), positions

    def _reserve(self, lengths: tuple[int, ...], step: Step) -> None:
        if max(lengths) > self.slots:
            self._allocate(max(lengths))

    def _allocate(self, tokens: int) -> None:
        slots = doubled(self.first_slots, tokens)
        if self.capacity is not None and self.capacity < 2 * slots:
            slots = self.capacity
        # Zeros, because a masked slot is multiplied by weight 0, and 0 * NaN is NaN. On a
        # CPU all layers are in one piece of memory, which may be on huge pages. Another
        # device allocates layer by layer.
        places = []
        for i in self.shape.own:
            heads, width, sides = stored(self.shape.layers[i])
            size = (self.batch, heads, slots, width)
            places += [(side, i, size) for side in (self.keys, self.values)[:sides]]
        numbers = [math.prod(size) for _, _, size in places]
        with torch.inference_mode(False), torch.no_grad():  # ordinary tensors, usable everywhere
            if self.device.type == "cpu":
                pieces = iter(huge_pages.zeros(sum(numbers), self.dtype).split(numbers))
            else:
                pieces = (torch.zeros(n, dtype=self.dtype, device=self.device) for n in numbers)
            for side, i, size in places:
                # Without `.data`, autograd takes a write to one layer for a write to all.
                new = next(pieces).view(size).data
                if side[i] is not None:
                    new[:, :, : self.length] = side[i][:, :, : self.length]
                side[i] = new
        self.slots, self._in_memory = slots, None

    def _select(self, rows: tuple[int, ...], order: Tensor) -> None:
        for side in (self.keys, self.values):
            side[:] = [t if t is None else t.index_select(0, order) for t in side]
