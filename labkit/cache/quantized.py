"""The quantised cache: codes and scales for the bulk, full precision for at most `tail` of the newest tokens.

Decode at long contexts reads the cache once a token; fewer bits are fewer bytes, and more users or more text in the same
memory. Keys have a few channels that are large in every token, so below 8 bits they want a scale per channel; values
have no such channels and want one per token (KIVI, arXiv 2402.02750). The formats are data: `labkit.plan.kv_formats`.

    append   the oldest whole block that no longer fits into the tail is quantised: once, and never again
    attend   `packed_attention`: scores and sums straight from the packed blocks

No full-precision copy of the cache exists at any time. Attention always reads what is stored, in a long prefill too.
Windows are masked, not dropped. It loses time where unpacking costs more than the bytes saved (INT4 on a CPU, short
contexts), and the answer is near, not equal: `labkit eval text --kv-format` says how near.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from labkit.cache.bulk import NOWHERE, Bulk, Move, plan
from labkit.cache.contract import KVCache
from labkit.cache.packed_attention import Buffer, Side, attend_packed
from labkit.cache.packed_blocks import encode, layout
from labkit.cache.rotation import check_frequencies, cos_sin, turn
from labkit.cache.step import Step, visible
from labkit.errors import BadRequest
from labkit.plan.kv_formats import KVFormat, get_kv_format
from labkit.plan.memory import KVShape

FIRST_SLOTS = 256


class QuantizedCache(KVCache):
    """`kv_format`: a name of `labkit.plan.kv_formats`, or a `KVFormat`. A format that quantises before RoPE needs
    `frequencies` [D/2], the radians a position by which the model turns its keys."""

    def __init__(self, shape: KVShape, batch: int = 1, capacity: int | None = None, dtype: torch.dtype = torch.float32,
                 device: str | torch.device = "cpu", kv_format: str | KVFormat = "int8",
                 frequencies: Tensor | None = None):  # fmt: skip
        super().__init__(shape, batch, capacity, dtype, device)
        self.format = replace(get_kv_format(kv_format), tail_bits=8 * dtype.itemsize)
        self.frequencies = frequencies if self.format.before_rope else None
        if not self.format.packed:
            raise BadRequest(f"KV format {self.format.name} has no scales; make a contiguous cache of that dtype.")
        if any(layer.latent_dim is not None for layer in shape.layers):
            raise BadRequest("The latent of an MLA layer is not quantised; make a contiguous cache for this model.")
        if self.format.before_rope:
            check_frequencies(frequencies, shape)
        self._home = [i if layer.shared_with is None else layer.shared_with for i, layer in enumerate(shape.layers)]
        self._own = [i for i, home in enumerate(self._home) if i == home]
        self.bulks = [Bulk(self.format.block) for _ in range(self.batch)]
        self.packed: dict[int, tuple[dict[str, Tensor], ...]] = {}  # layer -> tensors of keys, of values
        self.tails: dict[int, tuple[Tensor, Tensor]] = {}
        self._moves: list[Move] = []
        self.missing: set[int] = set()  # layers whose tokens of this pass have not come yet
        self._seen: dict = {}
        self._buffer = Buffer()
        most = None if capacity is None else self.format.packed_tokens(capacity)
        first = -(-FIRST_SLOTS // self.format.block) * self.format.block
        self.slots = first if most is None else min(first, most)
        with torch.inference_mode(False), torch.no_grad():
            tail = self.format.tail if capacity is None else min(self.format.tail, capacity)
            for i in self._own:
                size = (self.batch, shape.layers[i].num_kv_heads, tail, shape.layers[i].head_dim)
                self.tails[i] = tuple(torch.zeros(size, dtype=dtype, device=self.device) for _ in range(2))
        self._allocate(self.slots)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if self._home[layer] != layer:
            raise ValueError(f"Layer {layer} reads the cache of layer {self._home[layer]}; it has nothing to append.")
        same = all(move == self._moves[0] for move in self._moves)
        for row, move in enumerate(self._moves[:1] if same else self._moves):
            rows = slice(None) if same else slice(row, row + 1)
            self._store(layer, rows, move, keys[rows, :, : move.count], values[rows, :, : move.count])
        self.missing.discard(layer)

    def _store(self, layer: int, rows: slice, move: Move, *new: Tensor) -> None:
        oldest = []
        for side, tail in zip(new, self.tails[layer]):
            tail = tail[rows]  # [b, K, tail, D]
            if not move.pack:
                tail[:, :, move.held : move.left] = side
                continue
            every = torch.cat([tail[:, :, : move.held], side.to(self.dtype)], 2) if move.held else side.to(self.dtype)
            if move.left:
                tail[:, :, : move.left] = every[:, :, move.pack :]
            oldest.append(every[:, :, : move.pack])
        if not move.pack:
            return
        if self.frequencies is not None:
            back = -torch.arange(move.start, move.start + move.pack, device=self.device)
            oldest[0] = turn(oldest[0].float(), *cos_sin(back, self.frequencies))
        if self.format.keys == self.format.values:  # half the operators, and a step of decode is mostly these
            both = encode(torch.cat(oldest), self.format.keys)
            codes = [dict(zip(both, pair)) for pair in zip(*(t.chunk(2) for t in both.values()))]
        else:
            codes = [encode(oldest[0], self.format.keys), encode(oldest[1], self.format.values)]
        for held, found in zip(self.packed[layer], codes):
            for name, tensor in found.items():
                per = self.slots // held[name].shape[2]
                held[name][rows, :, move.slot // per : (move.slot + move.pack) // per] = tensor

    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        home, spec = self._home[layer], self.shape.layers[layer]
        slots = max(bulk.slots for bulk in self.bulks)
        tail = max(length - bulk.tokens for length, bulk in zip(self.lengths, self.bulks))
        sides = (
            Side(held, part, slots, dense[:, :, :tail])
            for held, part, dense in zip(self.packed[home], (self.format.keys, self.format.values), self.tails[home])
        )
        positions, seen = self._view(slots, tail, spec.window, spec.sinks)
        turns = None
        if self.frequencies is not None:
            if "turns" not in self._seen:
                at = positions[:, None, :slots].where(positions[:, None, :slots] < NOWHERE, 0)
                self._seen["turns"] = cos_sin(at, self.frequencies)
            turns = self._seen["turns"]
        return attend_packed(queries, *sides, seen, scale, turns, self._buffer)

    def _view(self, slots: int, tail: int, window: int | None, sinks: int) -> tuple[Tensor, Tensor | None]:
        """Positions [B or 1, S] of slots and tail, and who sees them [B or 1, T, S]; once a pass."""
        if (window, sinks) not in self._seen:
            one = all(b == self.bulks[0] for b in self.bulks) and len(set(self.lengths)) == 1
            rows = []
            for bulk, length in list(zip(self.bulks, self.lengths))[: 1 if one else None]:
                newest = torch.arange(bulk.tokens, bulk.tokens + tail)
                rows.append(torch.cat([bulk.positions(slots), newest.where(newest < length, NOWHERE)]))
            positions, step = torch.stack(rows).to(self.device), self.step
            everything = window is None and step.num_tokens == 1 and one and not self.bulks[0].short
            queries = step.positions[:1] if one and step.uniform else step.positions
            self._seen[window, sinks] = positions, None if everything else visible(queries, positions, window, sinks)
        return self._seen[window, sinks]

    def nbytes(self) -> int:
        tensors = [t for tail in self.tails.values() for t in tail]
        tensors += [t for packed in self.packed.values() for held in packed for t in held.values()]
        return sum(t.untyped_storage().nbytes() for t in tensors)

    def nbytes_used(self) -> int:
        total = 0
        for layer, bulk, length in ((self.shape.layers[i], *row) for i in self._own
                                    for row in zip(self.bulks, self.lengths)):  # fmt: skip
            for part in (self.format.keys, self.format.values):
                total += int(part.bytes(layer.head_dim, layer.num_kv_heads, bulk.slots))
                total += (length - bulk.tokens) * layer.head_dim * layer.num_kv_heads * self.dtype.itemsize
        return total

    def most_at_once(self) -> tuple[int | None, ...]:
        """Up to the next block to be packed: a token before that point would still have read it in full precision."""
        block, tail = self.format.block, self.format.tail
        left = (tail - (length - bulk.tokens) for length, bulk in zip(self.lengths, self.bulks))
        return (None,) * self.batch if tail == 0 and block == 1 else tuple(room if room > 0 else block for room in left)

    def _reserve(self, lengths: tuple[int, ...], step: Step) -> None:
        self._complete()
        self._moves = [plan(bulk, start, count, self.format.tail)
                       for bulk, start, count in zip(self.bulks, step.starts, step.counts)]  # fmt: skip
        needed, slots = max(move.slot + move.pack for move in self._moves), max(self.slots, self.format.block)
        while slots < needed:
            slots *= 2
        if self.capacity is not None:  # beyond what the capacity needs only where rewinding has left short blocks
            slots = min(slots, max(needed, self.slots, self.format.packed_tokens(self.capacity)))
        if slots > self.slots and needed > self.slots:
            self._allocate(slots)
        for bulk, move in zip(self.bulks, self._moves):
            bulk.slots += move.pack
        self.missing, self._seen = set(self._own), {}

    def _allocate(self, slots: int) -> None:
        """Layer by layer, so that growing holds one layer twice and not the whole cache."""
        with torch.inference_mode(False), torch.no_grad():
            for i in self._own:
                layer, grown = self.shape.layers[i], []
                for side, part in enumerate((self.format.keys, self.format.values)):
                    held = {}
                    for name, store in layout(part, layer.num_kv_heads, layer.head_dim).items():
                        size = (self.batch, store.heads, slots // store.per, store.width)
                        held[name] = torch.zeros(size, dtype=torch.uint8 if store.dtype.itemsize == 1 else store.dtype,
                                                 device=self.device).view(store.dtype)  # fmt: skip
                        if i in self.packed:
                            old = self.packed[i][side][name]
                            held[name][:, :, : old.shape[2]] = old
                    grown.append(held)
                self.packed[i] = tuple(grown)
        self.slots = slots

    def _complete(self) -> None:
        """A pass that broke off has moved tokens in some layers only: zeros finish it, and are forgotten with it."""
        for i in sorted(self.missing):
            layer = self.shape.layers[i]
            nothing = torch.zeros(self.batch, layer.num_kv_heads, self.step.num_tokens, layer.head_dim,
                                  dtype=self.dtype, device=self.device)  # fmt: skip
            self.append(i, nothing, nothing)

    def _rewind(self, lengths: tuple[int, ...]) -> None:
        self._complete()
        for bulk, keep in zip(self.bulks, lengths):
            bulk.cut(keep)

    def _select(self, rows: tuple[int, ...]) -> None:
        self._complete()
        order = torch.tensor(rows, device=self.device)
        pick = lambda t: t.view(torch.uint8).index_select(0, order).view(t.dtype) if t.dtype.itemsize == 1 else t.index_select(0, order)  # noqa: E731
        self.packed = {i: tuple({n: pick(t) for n, t in held.items()} for held in sides) for i, sides in self.packed.items()}
        self.tails = {i: tuple(map(pick, tail)) for i, tail in self.tails.items()}
        self.bulks = [self.bulks[row].copy() for row in rows]


def quantized_cache(kv_format: str | KVFormat, frequencies: Tensor | None = None) -> Callable[..., QuantizedCache]:
    """A maker of caches in that format, for `make_cache`, `generate` and the registry."""
    get_kv_format(kv_format)

    def make(shape: KVShape, batch: int = 1, capacity: int | None = None, dtype=torch.float32, device="cpu"):
        return QuantizedCache(shape, batch, capacity, dtype, device, kv_format, frequencies)

    return make
