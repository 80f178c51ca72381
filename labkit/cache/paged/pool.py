"""Store the content of the blocks that `blocks.py` counts.

    plain       numbers [blocks, K, size, D], any dtype
    quantized   codes, scales (and minima) [blocks, K, size, width], for formats that
                pack each token by itself

    bytes of a block = size * sum over layers of the bytes of a token

`labkit.plan.kv_bytes(..., page=size)` predicts these bytes.

A block has the same id in all layers, so one table serves all of them. A layer with a
window keeps its old tokens; they are masked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.cache.contract import stored
from labkit.cache.paged.blocks import Blocks
from labkit.cache.quantized.blocks import Store, decode, encode, layout, resized
from labkit.errors import BadRequest
from labkit.plan.kv import KVShape
from labkit.plan.kv_formats import KVFormat, get_kv_format

BLOCK = 16


class PagePool(Blocks):
    """Room for `blocks` * `size` tokens of a model, for any number of caches.

    `kv_format` is a format that packs each token by itself, or None for plain numbers
    of `dtype`. `layers[i]` has the tensors of layer i by name, for keys and for values.

    If `wipe` is set, a block is set to zeros when it becomes free, so memory and crash
    dumps contain no old data. Not thread-safe: use one lock for everything that shares
    a pool.
    """

    wipe = False

    def __init__(
        self,
        shape: KVShape,
        blocks: int,
        size: int = BLOCK,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        kv_format: str | KVFormat | None = None,
        grows: bool = False,
    ):
        super().__init__(blocks, size, grows)
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.format = form = None if kv_format is None else get_kv_format(kv_format)
        if form and (not form.packed or form.block != 1 or form.tail or form.before_rope):
            raise BadRequest(
                f"Pages cannot store the KV format {form.name}; choose int8_token, int8_token_sym, "
                "int8_g32, int4_g32 or fp8_e4m3, or None."
            )
        if form and any(layer.latent_dim is not None for layer in shape.layers):
            raise BadRequest(f"MLA latents cannot be stored as {form.name}; give no format.")
        self._parts = (form.keys, form.values) if form else ()
        self.layers: dict[int, tuple[dict[str, Tensor], ...]] = {}  # layer -> keys, values
        self._allocate()

    @property
    def name(self) -> str:
        """Name of the dtype or format of stored tokens, such as int8_token."""
        return self.format.name if self.format else str(self.dtype)

    def write(self, layer: int, side: int, blocks: Tensor, slots: Tensor, numbers: Tensor) -> None:
        """Write the numbers [N, K, D] of N tokens into their blocks and slots."""
        tensors = self.layers[layer][side]
        if self.format is None:
            tensors["numbers"][blocks, :, slots] = numbers.to(self.dtype)
            return
        packed = encode(numbers.transpose(0, 1)[None], self._parts[side])  # [1, K, N, width] each
        for name, codes in packed.items():
            tensors[name][blocks, :, slots] = codes[0].transpose(0, 1)

    def read(self, layer: int, side: int, tables: Tensor, length: int) -> Tensor:
        """Gather the first `length` tokens of tables [B, n]: [B, K, length, D]."""
        gathered, (B, n) = {}, tables.shape
        for name, tensor in self.layers[self.shape.home[layer]][side].items():
            blocks, K, size, width = tensor.shape
            heads = tables[:, None] * K + torch.arange(K, device=self.device)[:, None]  # [B, K, n]
            rows = tensor.view(blocks * K, size, width).index_select(0, heads.flatten())
            gathered[name] = rows.view(B, K, n * size, width)[:, :, :length]
        if self.format is None:
            return gathered["numbers"]
        return decode(gathered, self._parts[side], self.shape.layers[layer].head_dim)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            sources, targets = map(list, zip(*copies))
            with torch.no_grad():
                for tensor in self.tensors():
                    tensor[targets] = tensor[sources]

    def release(self, blocks: Sequence[int]) -> list[int]:
        freed = super().release(blocks)
        if freed and self.wipe:
            with torch.no_grad():
                for tensor in self.tensors():
                    tensor[freed] = 0
        return freed

    def tensors(self) -> list[Tensor]:
        return [t for sides in self.layers.values() for side in sides for t in side.values()]

    @property
    def block_bytes(self) -> int:
        return sum(tensor[0].nbytes for tensor in self.tensors())

    def nbytes(self) -> int:
        return self.total * self.block_bytes

    def __repr__(self) -> str:
        return f"PagePool({self.owned} of {self.total} blocks in use, {self.name}, {self.nbytes()} bytes)"

    def _add(self, more: int) -> None:
        super()._add(more)
        self._allocate()

    def _allocate(self) -> None:
        """Allocate memory for every block.

        Layers are allocated one by one, so growing copies one layer at a time.
        """
        for i in self.shape.own:
            heads, width, sides = stored(self.shape.layers[i])
            stores = [layout(part, heads, width) for part in self._parts]
            if self.format is None:
                stores = [{"numbers": Store(heads, 1, width, self.dtype)}] * sides
            pairs = zip(stores, self.layers.get(i, ({}, {})))
            self.layers[i] = tuple(resized(*p, self.total, self.size, self.device) for p in pairs)
