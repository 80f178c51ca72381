"""The pool of a paged cache: its blocks' contents, one tensor a layer and side, over the bookkeeping of `blocks.py`.

    plain       numbers [blocks, K, size, D]                              any dtype
    quantised   codes, scales (and minima) [blocks, K, size, width]       formats that pack each token by itself

    bytes of a block = size * sum over layers of the bytes of a token     (`labkit.plan.kv_bytes(..., page=size)`)

One block id means the same block in all layers, so tables and copies exist once, not once a layer. A windowed layer
keeps its old tokens (they are masked); a pool for windows alone would want tables of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.cache.blocks import Blocks
from labkit.cache.contiguous import stored
from labkit.cache.packed_blocks import decode, encode, layout
from labkit.errors import BadRequest
from labkit.plan.kv_formats import KVFormat, get_kv_format
from labkit.plan.memory import KVShape

BLOCK = 16
PLAIN = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def packed_format(kv_format: str | KVFormat | None) -> KVFormat | None:
    """The format, None for plain numbers; a format that packs blocks of tokens, or keeps a tail, is refused."""
    found = None if kv_format is None else get_kv_format(kv_format)
    if found is not None and (not found.packed or found.block != 1 or found.tail or found.before_rope):
        raise BadRequest(
            f"KV format {found.name} does not pack each token by itself, which pages need; choose int8_token, "
            "int8_token_sym, int8_g32, int4_g32 or fp8_e4m3, or give a dtype alone."
        )
    return found


def copyable(tensor: Tensor) -> Tensor:
    """Bytes as uint8, which every operator can copy."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


class PagePool(Blocks):
    """Room for `blocks` * `size` tokens of a model's KV cache, shared by any number of caches, forks and prefixes.

    `wipe`: a block that nobody holds any more is set to zeros at once, so that memory and crash dumps hold nothing of
    the past. Not safe for threads: one lock around everything that shares a pool.
    """

    def __init__(self, shape: KVShape, blocks: int, size: int = BLOCK, dtype: torch.dtype = torch.float32,
                 device: str | torch.device = "cpu", kv_format: str | KVFormat | None = None, *, grows: bool = False,
                 wipe: bool = False):  # fmt: skip
        super().__init__(blocks, size, grows)
        self.shape, self.dtype, self.device, self.wipe = shape, dtype, torch.device(device), wipe
        self.format = packed_format(kv_format)
        if self.format and any(layer.latent_dim is not None for layer in shape.layers):
            raise BadRequest("The latent of an MLA layer is not quantised; make a pool of plain numbers for this model.")
        self.home = [i if layer.shared_with is None else layer.shared_with for i, layer in enumerate(shape.layers)]
        self.held: dict[int, tuple[dict[str, Tensor], ...]] = {}  # layer -> tensors of keys, of values
        self._grow(blocks)

    @property
    def name(self) -> str:
        """How a token is stored, as a word: fp32, bf16, int8_token ..."""
        return self.format.name if self.format else PLAIN.get(self.dtype, str(self.dtype))

    def write(self, layer: int, side: int, blocks: Tensor, slots: Tensor, numbers: Tensor) -> None:
        """Numbers [N, K, D] of N tokens into their blocks and slots."""
        held = self.held[layer][side]
        if self.format is None:
            held["numbers"][blocks, :, slots] = numbers.to(self.dtype)
            return
        for name, codes in encode(numbers.transpose(0, 1)[None], self._part(side)).items():  # [1, K, N, width]
            held[name][blocks, :, slots] = codes[0].transpose(0, 1)

    def read(self, layer: int, side: int, table: Tensor, length: int) -> Tensor:
        """A dense copy of one sequence's first `length` tokens [K, length, D], for attention the plain way."""
        found = {}
        for name, tensor in self.held[self.home[layer]][side].items():
            blocks, heads, size, width = tensor.shape
            rows = (table * heads + torch.arange(heads, device=self.device)[:, None]).view(-1)  # head by head: one copy
            found[name] = copyable(tensor).view(blocks * heads, size, -1).index_select(0, rows).view(tensor.dtype)
            found[name] = found[name].view(heads, -1, width)[:, :length]
        if self.format is None:
            return found["numbers"]
        one = {name: tensor[None] for name, tensor in found.items()}
        return decode(one, self._part(side), self.shape.layers[layer].head_dim)[0]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        with torch.no_grad():
            for tensor in self.tensors():
                copyable(tensor)[list(targets)] = copyable(tensor)[list(sources)]

    def release(self, blocks: Sequence[int]) -> list[int]:
        freed = super().release(blocks)
        if freed and self.wipe:
            with torch.no_grad():
                for tensor in self.tensors():
                    copyable(tensor)[freed] = 0
        return freed

    def tensors(self) -> list[Tensor]:
        return [tensor for sides in self.held.values() for side in sides for tensor in side.values()]

    @property
    def block_bytes(self) -> int:
        return sum(t[0].numel() * t.dtype.itemsize for t in self.tensors())

    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.tensors())

    def __repr__(self) -> str:
        return f"PagePool({self.owned} of {self.total} blocks of {self.size} tokens held, {self.name}, {self.nbytes()} bytes)"

    def _part(self, side: int):
        return self.format.values if side else self.format.keys

    def _grow(self, total: int) -> None:
        """Zeros, which the system hands out as they are touched. Layer by layer: growing holds one layer twice."""
        with torch.inference_mode(False), torch.no_grad():
            for i, layer in enumerate(self.shape.layers):
                if self.home[i] != i:
                    continue
                heads, width, sides = stored(layer)
                if self.format is None:
                    stores = [{"numbers": (heads, width, self.dtype)}] * sides
                else:
                    stores = [{name: (s.heads, s.width, s.dtype) for name, s in layout(self._part(side), heads, width).items()}
                              for side in range(2)]  # fmt: skip
                grown = tuple({name: self._larger(i, side, name, total, *store) for name, store in names.items()}
                              for side, names in enumerate(stores))  # fmt: skip
                self.held[i] = grown

    def _larger(self, layer: int, side: int, name: str, total: int, heads: int, width: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.zeros(total, heads, self.size, width, dtype=torch.uint8 if dtype.itemsize == 1 else dtype,
                             device=self.device).view(dtype)  # fmt: skip
        if layer in self.held:
            old = self.held[layer][side][name]
            tensor[: old.shape[0]] = old
        return tensor
