"""The contiguous cache: one block of keys and one of values per layer, slot s holds position s.

A decode step then computes one token instead of the whole text again: the work of the weights per new token
falls from S tokens to one, and reading the cache (2 * K * D numbers per token held and layer) takes its place.

    bytes = rows * slots * sum over layers of (2 * K * D) * bytes of a number

Slots double when they run out, up to `capacity`, so appending costs O(1) copies a token on average; while a cache
grows, the old and the new one are both there. A capacity below the next doubling is taken at once.
It loses when rows differ much in length (every row is as long as the longest; see the paged cache), and for
very short texts, where recomputing a few tokens costs as much as reading them back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.cache.contract import KVCache
from labkit.cache.step import Step, attend_dense
from labkit.measure import pages
from labkit.plan.memory import KVShape, LayerKV

FIRST_SLOTS = 256


def stored(layer: LayerKV) -> tuple[int, int, int]:
    """Heads, numbers a head and token, and how many tensors: keys and values, or (MLA) latent and rotated key as one."""
    if layer.latent_dim is not None:
        return 1, layer.latent_dim + layer.rope_dim, 1
    return layer.num_kv_heads, layer.head_dim, 2


class ContiguousCache(KVCache):
    """Dense keys and values [B, K, slots, D] per layer; windows of the shape are masked, not dropped."""

    def __init__(self, shape: KVShape, batch: int = 1, capacity: int | None = None,
                 dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"):
        super().__init__(shape, batch, capacity, dtype, device)
        self.slots = self._enough(1)
        self._home = [i if layer.shared_with is None else layer.shared_with for i, layer in enumerate(shape.layers)]
        self.keys: list[Tensor | None] = [None] * shape.num_layers
        self.values: list[Tensor | None] = [None] * shape.num_layers
        self.addresses: tuple | None = None  # what a native stack remembers of where the tensors lie, until they move
        self._allocate(self.slots)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if self._home[layer] != layer:
            raise ValueError(f"Layer {layer} reads the cache of layer {self._home[layer]}; it has nothing to append.")
        step, both = self.step, ((self.keys[layer], keys), (self.values[layer], values))
        if self.shape.layers[layer].latent_dim is not None:
            both = both[:1]  # the values are a part of the keys
        if step.uniform:
            start = step.starts[0]
            end = start + step.num_tokens
            for held, new in both:
                held[:, :, start:end] = new
        else:
            rows, tokens, slots = step.scatter()  # [N] each; the padding is in none of them
            for held, new in both:
                held[rows, :, slots] = new[rows, :, tokens].to(self.dtype)  # [N, K, D]

    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        spec, home, length = self.shape.layers[layer], self._home[layer], self.step.length
        keys = self.keys[home][:, :, :length]  # [B, K, S, D]
        values = keys[..., : spec.latent_dim] if spec.latent_dim is not None else self.values[home][:, :, :length]
        return attend_dense(self.step, queries, keys, values, scale=scale, window=spec.window, sinks=spec.sinks)

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values) if t is not None)

    def nbytes_used(self) -> int:
        own = (layer for i, layer in enumerate(self.shape.layers) if self._home[i] == i)
        numbers = sum(heads * width * sides for heads, width, sides in map(stored, own))
        return sum(self.lengths) * numbers * self.dtype.itemsize

    def _reserve(self, lengths: tuple[int, ...], step: Step) -> None:
        if max(lengths) > self.slots:
            self._allocate(self._enough(max(lengths)))

    def _enough(self, length: int) -> int:
        slots = FIRST_SLOTS
        while slots < length:
            slots *= 2
        return slots if self.capacity is None or self.capacity >= 2 * slots else self.capacity

    def _allocate(self, slots: int) -> None:
        # Zeros, because a masked slot still takes part with weight 0, and 0 * NaN is NaN. Ordinary tensors even
        # under inference mode, so that a cache filled there can be used outside of it. On a CPU all layers lie in one
        # piece, which may be on huge pages; a device grows layer by layer, and so holds only one of them twice.
        own = [(i, *stored(layer)) for i, layer in enumerate(self.shape.layers) if self._home[i] == i]
        numbers = [self.batch * heads * slots * width for _, heads, width, sides in own for _ in range(sides)]
        with torch.inference_mode(False), torch.no_grad():
            if self.device.type == "cpu":
                pieces = iter(pages.zeros(sum(numbers), self.dtype).split(numbers))
            else:
                pieces = (torch.zeros(n, dtype=self.dtype, device=self.device) for n in numbers)
            for i, heads, width, sides in own:
                for side in (self.keys, self.values)[:sides]:
                    # `.data`: a tensor of its own for autograd, which else takes a write in one layer for a write in all
                    grown = next(pieces).view(self.batch, heads, slots, width).data
                    if side[i] is not None:
                        grown[:, :, : self.length] = side[i][:, :, : self.length]
                    side[i] = grown
        self.slots, self.addresses = slots, None

    def _select(self, rows: tuple[int, ...]) -> None:
        order = torch.tensor(rows, device=self.device)
        for side in (self.keys, self.values):
            side[:] = [t if t is None else t.index_select(0, order) for t in side]
        self.addresses = None
