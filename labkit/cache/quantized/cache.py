"""Cache codes and scales, with full precision for the newest tokens.

Each decode step reads the whole cache. Fewer bits make that faster and leave memory for
more users or longer texts. Keys have a few channels that are large in every token, so
below 8 bits they need a scale per channel. Values have no such channels, so a scale per
token is enough (KIVI, arXiv 2402.02750). `labkit.plan.kv_formats` defines the formats.

    append   quantizes the oldest whole block that no longer fits into the tail, once
    attend   computes scores and sums from the packed blocks (`quantized/attention.py`)

No full-precision copy of the cache exists at any time. Attention always reads the
packed blocks, even in a long prefill. Windows are masked, not dropped.

When it loses: unpacking costs more time than the saved bytes (INT4 on a CPU, short
contexts). The answer is close to the exact one but not equal. `labkit eval text
--kv-format` measures the difference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.cache.contract import InMemory, KVCache, doubled, grown
from labkit.cache.forward_pass import NOWHERE, Step, visible
from labkit.cache.quantized.attention import Buffer, Side, attend_packed, cos_sin, rotate
from labkit.cache.quantized.blocks import decode, encode, layout, resized
from labkit.cache.quantized.packed_slots import Bulk, Move, plan
from labkit.errors import BadRequest
from labkit.kernels.native.table_attention import MOST_QUERIES, Rows, table_attention
from labkit.plan.kv_formats import KVFormat, get_kv_format


class QuantizedCache(KVCache):
    """A cache in `kv_format`, a `KVFormat` or its name.

    A format that quantizes keys before RoPE needs `frequencies` [D/2]: the radians per
    position by which the model rotates its keys. They must not change with the length
    (no dynamic NTK). The other arguments are those of KVCache.
    """

    stores_latents = False

    def __init__(
        self,
        *sizes: Any,
        kv_format: str | KVFormat = "int8",
        frequencies: Tensor | None = None,
        **named: Any,
    ):
        super().__init__(*sizes, **named)
        self.format = replace(get_kv_format(kv_format), tail_bits=8 * self.dtype.itemsize)
        name, before_rope = self.format.name, self.format.before_rope
        if not self.format.packed:
            raise BadRequest(f"KV format {name} has no scales; use a contiguous cache instead.")
        given = getattr(frequencies, "shape", None)
        if before_rope and any(given != (spec.head_dim / 2,) for spec in self.shape.layers):
            raise BadRequest(f"The frequencies have shape {given}; {name} needs [head_dim / 2].")
        self.frequencies = frequencies if before_rope else None
        self.parts = (self.format.keys, self.format.values)
        self.bulks = [Bulk(self.format.block) for _ in range(self.batch)]
        self.packed: dict[int, tuple[dict[str, Tensor], ...]] = {}  # layer -> keys, values
        self.tails: dict[int, tuple[Tensor, ...]] = {}  # layer -> keys, values
        self.missing: set[int] = set()  # layers that have not appended their tokens in this pass
        self._moves: list[Move] = []
        self._buffer = Buffer()
        tail = min(self.format.tail, self.capacity or self.format.tail)
        for i in self.shape.own:
            layer = self.shape.layers[i]
            size = (self.batch, layer.num_kv_heads, tail, layer.head_dim)
            self.tails[i] = tuple(grown(None, size, self.dtype, self.device) for _ in "kv")
        self.slots = 0
        self._allocate(0)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.check_own(layer)
        same = all(move == self._moves[0] for move in self._moves)
        for row, move in enumerate(self._moves[:1] if same else self._moves):
            rows = slice(None) if same else slice(row, row + 1)
            new = (side[rows, :, : move.count] for side in (keys, values))
            self._store(layer, rows, move, *new)
        self.missing.discard(layer)

    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        spec, memory = self.shape.layers[layer], self.in_memory()
        if memory is not None and queries.shape[2] <= MOST_QUERIES:
            if "rows" not in self._pass:
                self._pass["rows"] = Rows(self.step.starts, self.step.counts)
            sides, rows = (memory.keys[layer], memory.values[layer]), self._pass["rows"]
            out = table_attention(queries, *sides, rows, scale, spec.window)
            if out is not None:
                return out
        keys, values = self._sides(self.shape.home[layer])
        _, seen, rotation = self._view(keys.slots, keys.tail.shape[2], spec.window, spec.sinks)
        return attend_packed(queries, keys, values, seen, scale, rotation, self._buffer)

    def _store(self, layer: int, rows: slice, move: Move, *new: Tensor) -> None:
        """Write new tokens into the tail; pack the oldest blocks that do not fit."""
        oldest = []
        for side, tail in zip(new, self.tails[layer]):
            tail = tail[rows]  # [b, K, tail, D]
            if not move.pack:
                tail[:, :, move.tail : move.left] = side
                continue
            tokens = side.to(self.dtype)
            if move.tail:
                tokens = torch.cat([tail[:, :, : move.tail], tokens], 2)
            if move.left:
                tail[:, :, : move.left] = tokens[:, :, move.pack :]
            oldest.append(tokens[:, :, : move.pack])
        if not move.pack:
            return
        if self.frequencies is not None:
            back = -torch.arange(move.start, move.start + move.pack, device=self.device)
            oldest[0] = rotate(oldest[0].float(), *cos_sin(back, self.frequencies))
        if self.parts[0] == self.parts[1]:  # one call instead of two
            both = encode(torch.cat(oldest), self.parts[0])
            codes = [dict(zip(both, pair)) for pair in zip(*(t.chunk(2) for t in both.values()))]
        else:
            codes = list(map(encode, oldest, self.parts))
        for packed, encoded in zip(self.packed[layer], codes):
            for name, tensor in encoded.items():
                per = self.slots // packed[name].shape[2]
                packed[name][rows, :, move.slot // per : (move.slot + move.pack) // per] = tensor

    def _sides(self, layer: int) -> list[Side]:
        """Return the keys and values of a layer for `attend_packed`."""
        slots = max(bulk.slots for bulk in self.bulks)
        tail = max(length - bulk.tokens for length, bulk in zip(self.lengths, self.bulks))
        sides = zip(self.packed[layer], self.parts, self.tails[layer])
        return [Side(packed, part, slots, dense[:, :, :tail]) for packed, part, dense in sides]

    def _view(self, slots: int, tail: int, window: int | None, sinks: int) -> tuple[Any, ...]:
        """Return positions, mask and rotation of the packed slots and the tail.

        The positions are [B or 1, S]. The mask [B or 1, T, S] marks the keys that each
        query sees (None: all). The rotation is cos and sin of the packed slots, if keys
        are stored before RoPE (None otherwise).
        """
        if (window, sinks) not in self._pass:
            one = all(b == self.bulks[0] for b in self.bulks) and len(set(self.lengths)) == 1
            rows, rotation = [], None
            for bulk, length in zip(self.bulks[: 1 if one else None], self.lengths):
                newest = torch.arange(bulk.tokens, bulk.tokens + tail)
                newest = newest.where(newest < length, NOWHERE)
                rows.append(torch.cat([bulk.positions(slots), newest]))
            positions, step = torch.stack(rows).to(self.device), self.step
            everything = window is None and step.num_tokens == 1 and one and not self.bulks[0].short
            queries = step.positions[:1] if one and step.uniform else step.positions
            seen = None if everything else visible(queries, positions, window, sinks)
            if self.frequencies is not None:
                at = positions[:, None, :slots]
                rotation = cos_sin(at.where(at < NOWHERE, 0), self.frequencies)
            self._pass[window, sinks] = positions, seen, rotation
        return self._pass[window, sinks]

    def tensors(self) -> list[Tensor]:
        packed = [t for sides in self.packed.values() for side in sides for t in side.values()]
        return [*packed, *(t for tail in self.tails.values() for t in tail)]

    def nbytes_used(self) -> int:
        packed = sum(bulk.slots for bulk in self.bulks)
        tail = sum(self.lengths) - sum(bulk.tokens for bulk in self.bulks)
        total = 0
        for layer in (self.shape.layers[i] for i in self.shape.own):
            K, D = layer.num_kv_heads, layer.head_dim
            total += sum(int(part.bytes(D, K, packed)) for part in self.parts)
            total += 2 * tail * D * K * self.dtype.itemsize
        return total

    def most_at_once(self) -> tuple[int | None, ...]:
        """Return the number of tokens that fit before the next block is packed.

        In single steps, these tokens read the block in full precision.
        """
        if self.format.tail == 0:
            return (None,) * self.batch
        tails = (length - bulk.tokens for length, bulk in zip(self.lengths, self.bulks))
        return tuple(self.format.tail - tail or self.format.block for tail in tails)

    def _layout(self) -> InMemory | None:
        if self.format.name != "int8_token" or self.dtype not in (torch.float32, torch.bfloat16):
            return None
        sides = ([self.packed[i][side] for i in self.shape.own] for side in (0, 1))
        return InMemory("int8", self.slots, *sides)

    def _cached_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, _ = self._sides(layer)
        positions, _, rotation = self._view(keys.slots, keys.tail.shape[2], None, 0)
        numbers = [decode(block, keys.part, keys.tail.shape[3]) for _, block in keys.blocks()]
        if rotation is not None and numbers:
            numbers = [rotate(torch.cat(numbers, 2), *rotation)]
        return torch.cat([*numbers, keys.tail.float()], 2), positions.expand(self.batch, -1)

    def _reserve(self, lengths: tuple[int, ...], step: Step) -> None:
        self._complete()
        rows = zip(self.bulks, step.starts, step.counts)
        self._moves = [plan(bulk, start, count, self.format.tail) for bulk, start, count in rows]
        needed = max(move.slot + move.pack for move in self._moves)
        if needed > self.slots:
            self._allocate(needed)
        for bulk, move in zip(self.bulks, self._moves):
            bulk.slots += move.pack
        self.missing = set(self.shape.own) if self.format.tail else set()

    def _allocate(self, needed: int) -> None:
        """Make room for `needed` packed tokens; growing copies one layer at a time."""
        first = -(-self.first_slots // self.format.block) * self.format.block
        slots = doubled(max(self.slots, first), needed)
        if self.capacity is not None:  # after a rewind, short blocks may need more slots
            slots = min(slots, max(needed, self.format.packed_tokens(self.capacity)))
        for i in self.shape.own:
            layer, old = self.shape.layers[i], self.packed.get(i, ({}, {}))
            stores = [layout(part, layer.num_kv_heads, layer.head_dim) for part in self.parts]
            pairs = zip(stores, old)
            self.packed[i] = tuple(resized(*p, self.batch, slots, self.device) for p in pairs)
        self.slots, self._in_memory = slots, None

    def _complete(self) -> None:
        """Finish an interrupted pass: append zeros to the layers that it did not reach.

        Tails and packed tokens then have equal lengths in all layers. The following
        rewind drops the zeros.
        """
        for i in sorted(self.missing):
            layer = self.shape.layers[i]
            size = (self.batch, layer.num_kv_heads, self.step.num_tokens, layer.head_dim)
            zeros = torch.zeros(size, dtype=self.dtype, device=self.device)
            self.append(i, zeros, zeros)

    def _rewind(self, lengths: tuple[int, ...]) -> None:
        self._complete()
        for bulk, keep in zip(self.bulks, lengths):
            bulk.cut(keep)

    def _select(self, rows: tuple[int, ...], order: Tensor) -> None:
        self._complete()

        def pick(tensor: Tensor) -> Tensor:
            plain = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
            return plain.index_select(0, order).view(tensor.dtype)

        for i, sides in self.packed.items():
            self.packed[i] = tuple({n: pick(t) for n, t in side.items()} for side in sides)
            self.tails[i] = tuple(map(pick, self.tails[i]))
        self.bulks = [copy.deepcopy(self.bulks[row]) for row in rows]


def quantized_cache(
    kv_format: str | KVFormat, frequencies: Tensor | None = None
) -> Callable[..., QuantizedCache]:
    """Return a function that makes quantized caches, for `make_cache`."""
    return partial(QuantizedCache, kv_format=get_kv_format(kv_format), frequencies=frequencies)
