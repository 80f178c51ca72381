"""Store weights in the order in which the native kernels read them.

A matrix [N, K] becomes blocks of 16 rows. A block stores, for each group of columns, 16
float16 scales and 16 float16 offsets (minima, or minus the zero point). The codes of
the group follow: per 32 columns, lines of 64 bytes, each with 4 bytes for each of the
16 rows.

    INT4       4 lines; line i has columns 4i .. 4i + 3 in the low nibbles, and
               16 + 4i .. 19 + 4i in the high ones
    INT8       8 lines; line i has columns 4i .. 4i + 3
    bfloat16   16 lines; line i has columns 2i and 2i + 1

    bytes = blocks * 16 rows * (K padded) * bits / 8 + 64 per group and block
    (int4_g32_min: 5 bits per weight, as in the format itself)

Half the range (8 or 128) is added to symmetric codes, because `dot4` needs unsigned
weights. Rows are padded with zeros to a multiple of 16, and columns to a
multiple of 32 (or of the group). Packing is exact: `unpacked` returns the numbers of
the format.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.errors import BadRequest
from labkit.formats.names import NumberFormat, get_format
from labkit.formats.tensor import QuantizedTensor
from labkit.kernels.native.build import library
from labkit.kernels.native.structures import Matrix
from labkit.kernels.packed_weight import PackedWeight

# `enum Kind` in native.cpp, without bf16. A symmetric format in groups has a zero point of half
# its range.
KINDS = list(product((4, 8), ("row", "minimum", "zero_point")))


def kind_of(format: str | NumberFormat) -> int | None:
    """Return the number of the kernel for a format in C++, or None if there is none.

    Kernels exist for bf16, and for integers of 4 or 8 bits with scales per row, or per
    group of a multiple of 32.
    """
    format = get_format(format)
    if format.name == "bf16":
        return 0
    offset = format.offset or "zero_point" if format.group_size else "row"
    fits = format.kind == "integer" and (format.bits, offset) in KINDS
    if not fits or (format.group_size % 32 if format.group_size else format.offset):
        return None
    return 1 + KINDS.index((format.bits, offset))


def padded(format: NumberFormat, shape: tuple[int, ...], pair: bool = False) -> tuple[int, int]:
    """Return the number of blocks of 16 rows and of groups of 32 columns.

    The two halves of a pair (gate and up) are padded separately.
    """
    (rows, cols), wide = shape, 1 + pair
    step = max(32, format.group_size or 32)
    return wide * -(-rows // wide // 16), -(-cols // step) * step // 32


def block_nbytes(format: str | NumberFormat, shape: tuple[int, ...], pair: bool = False) -> int:
    """Return the bytes of all blocks, without the float32 scales of row formats."""
    format = get_format(format)
    blocks, groups = padded(format, shape, pair)
    heads = groups * 32 // format.group_size * 64 if format.group_size else 0
    return blocks * (groups * 64 * format.bits + heads)


class NativePack(PackedWeight):
    """A matrix in the layout of the native kernels.

    `pair`: the rows are those of gate and then of up; their blocks alternate. `bias`:
    float [N], added by the kernel. `out`: memory for the blocks (uint8), so that the
    matrices of a model can be in one piece of memory.
    """

    dtype = torch.float32
    blocks: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        quantized: QuantizedTensor,
        *,
        pair: bool = False,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ):
        super().__init__(quantized)
        format, rows = self.format, self.shape[0]
        if kind_of(format) is None:
            raise BadRequest(
                f"Native kernels do not support {format.name}; choose bf16, int8_channel, "
                "int4_channel, or INT4 or INT8 in groups of a multiple of 32."
            )
        self.pair = pair
        blocks, groups = padded(format, self.shape, pair)
        size = block_nbytes(format, self.shape, pair)
        memory = torch.empty(size, dtype=torch.uint8) if out is None else out[:size]
        memory.copy_(_blocks(quantized, blocks, groups, pair).reshape(-1))
        scale = None
        if format.sharing in ("row", "tensor"):
            scale = quantized.grid.scale.float().expand(rows, 1)
            scale = _by_blocks(scale, blocks, pair).reshape(-1)
        if bias is not None:
            bias = _by_blocks(bias.float()[:, None], blocks, pair).reshape(-1)
        self._store(blocks=memory, scale=scale, bias=bias)
        self._describe()

    def _describe(self) -> None:
        """Set `struct`, which has the addresses of the buffers for the C++ code."""
        tensors = (self.blocks, self.scale, self.bias)
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        groups, per = padded(self.format, self.shape)[1], (self.format.group_size or 32) // 32
        kind, pair = kind_of(self.format), int(self.pair)
        self.struct = Matrix(*addresses, *self.shape, groups, kind, per, pair)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"struct": None}  # a copy has other addresses

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._describe()

    @classmethod
    def supports(cls, format: NumberFormat, shape: tuple[int, ...], device: torch.device) -> bool:
        return kind_of(format) is not None and len(shape) == 2 and device.type == "cpu"

    @classmethod
    def resident_nbytes(cls, format: NumberFormat, shape: tuple[int, ...]) -> int:
        scales = 64 * padded(format, shape)[0] if format.sharing in ("row", "tensor") else 0
        return block_nbytes(format, shape) + scales

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [..., K] -> [..., N] in x's dtype; sums are in float32.

        For integer formats, activations are rounded to INT8 in groups of 32.
        """
        flat = x.reshape(-1, self.shape[1]).float().contiguous()
        out = torch.empty(flat.shape[0], self.shape[0])
        call = (ctypes.byref(self.struct), flat.data_ptr(), out.data_ptr(), flat.shape[0])
        if flat.shape[0] and library().lk_linear(*call, torch.get_num_threads()):
            raise MemoryError("There is not enough memory for the product; use fewer rows.")
        out = out.view(*x.shape[:-1], self.shape[0]).to(x.dtype)
        return out if bias is None else out + bias

    def rows(self, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        flat = index.reshape(-1).long().contiguous()
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.shape[0]:
            raise IndexError(f"A row index is out of range; give 0 to {self.shape[0] - 1}.")
        return self._rows(flat).view(*index.shape, self.shape[1]).to(dtype)

    def _rows(self, index: Tensor) -> Tensor:
        """Return rows by their index in the blocks, float32 [M, K]."""
        out, struct = torch.empty(index.numel(), self.shape[1]), ctypes.byref(self.struct)
        library().lk_rows(struct, index.data_ptr(), out.data_ptr(), index.numel())
        return out

    def unpacked(self) -> Tensor:
        """Return the weight in float32 [N, K], exactly as the format represents it."""
        index = torch.arange(self.shape[0])
        if self.pair:  # blocks of gate and up alternate
            row = index % (self.shape[0] // 2)
            index = row // 16 * 32 + row % 16 + 16 * (index >= self.shape[0] // 2)
        return self._rows(index)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NativePack:
        device = fn(torch.empty(0)).device
        if device.type != "cpu":
            raise BadRequest(
                f"Weights of native kernels stay on the CPU; load the plain model on {device}."
            )
        return self


def _by_blocks(rows: Tensor, blocks: int, pair: bool) -> Tensor:
    """Split [N, X] into [blocks, 16, X], padded with zeros; the blocks of a pair alternate."""
    halves = rows.view(1 + pair, -1, rows.shape[1])
    missing = blocks * 16 // (1 + pair) - halves.shape[1]
    halves = F.pad(halves, (0, 0, 0, missing)).unflatten(1, (-1, 16))
    return halves.transpose(0, 1).reshape(blocks, 16, -1)


def _blocks(quantized: QuantizedTensor, blocks: int, groups: int, pair: bool) -> Tensor:
    """Return the packed weight, uint8 [blocks, bytes per block]."""
    format, codes, half = quantized.format, quantized.codes, 1 << (quantized.format.bits - 1)
    if format.kind == "integer" and format.symmetric:
        codes = (codes ^ -half).view(torch.uint8) & (2 * half - 1)  # code + half, without widening
    columns = F.pad(_by_blocks(codes, blocks, pair), (0, groups * 32 - codes.shape[1]))
    # A line of 64 bytes has 16 rows x 4 bytes: [blocks, groups, line, row, column].
    per_line = 4 // codes.itemsize
    lines = columns.view(blocks, 16, groups, -1, per_line).permute(0, 2, 3, 1, 4)
    if format.bits == 4:
        lines = lines[:, :, :4] | lines[:, :, 4:] << 4
    lines = lines.contiguous().view(torch.uint8).view(blocks, groups, -1)
    if not format.group_size:
        return lines.view(blocks, -1)
    scale = quantized.grid.scale
    offset = torch.full(scale.shape, -half) if quantized.offset is None else quantized.offset
    if format.offset == "zero_point":
        offset = -offset.float()
    heads = torch.stack([_by_blocks(t.half(), blocks, pair) for t in (scale, offset)], 1)
    heads = heads.permute(0, 3, 1, 2).contiguous().view(torch.uint8)  # [blocks, scales, 2, 32]
    heads = heads.view(blocks, heads.shape[1], 64)
    return torch.cat([heads, lines.view(blocks, heads.shape[1], -1)], -1).view(blocks, -1)
