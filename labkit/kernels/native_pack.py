"""Weights in the order in which the native kernels read them, and the structures that are handed over.

A matrix [N, K] becomes blocks of 16 rows. In a block, per group of columns: 16 float16 scales, 16 float16 offsets (minima,
or minus the zero point), then per 32 columns the codes, 64 bytes = 16 rows x 4 columns at a time. INT4: the low nibbles of
line i hold columns 4i.., the high ones columns 16 + 4i.. ; INT8: line i holds 4i..; bfloat16: line i holds 2i, 2i + 1.

    bytes = blocks * 16 rows * (K padded) * bits / 8 + 64 a group and block    (int4_g32_min: 5 bits a weight, the format's own)

Symmetric codes are stored plus half their range (8 or 128), since `dot4` wants unsigned weights. Rows are padded to 16
and columns to 32 (or the group) with zeros. What is held is exact: `unpacked` gives back the format's own numbers.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.errors import BadRequest
from labkit.formats.names import NumberFormat, get_format
from labkit.formats.tensor import QuantizedTensor

KINDS = {"bf16": 0, (4, "row"): 1, (4, "minimum"): 2, (4, "zero_point"): 3, (8, "row"): 4, (8, "minimum"): 5, (8, "zero_point"): 6}


class Matrix(ctypes.Structure):
    _fields_ = [("blocks", c_void_p), ("scale", c_void_p), ("bias", c_void_p),
                *((name, c_int32) for name in ("rows", "cols", "groups", "kind", "per", "pair"))]  # fmt: skip


class Layer(ctypes.Structure):
    _fields_ = [*((name, Matrix) for name in ("qkv", "o", "gate_up", "down")),
                *((name, c_void_p) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm"))]  # fmt: skip


class Model(ctypes.Structure):
    _fields_ = [("layers", c_void_p), ("embed", Matrix), ("head", Matrix),
                *((name, c_void_p) for name in ("norm", "cos", "sin")),
                *((name, c_int32) for name in ("L", "E", "H", "K", "D", "I", "V")), ("eps", c_float)]  # fmt: skip


class Step(ctypes.Structure):
    _fields_ = [*((name, c_void_p) for name in ("ids", "row", "position", "logits_at", "window", "keys", "values", "scales",
                                                 "logits", "hidden", "spent")),
                *((name, c_int32) for name in ("N", "slots", "kv", "rounded", "threads"))]  # fmt: skip


def kind_of(format: str | NumberFormat) -> int | None:
    """The kernel for a format, or None: integers of 4 and 8 bits by row or by groups of 32, 64, 96, ...; bf16."""
    format = get_format(format)
    if format.name == "bf16":
        return KINDS["bf16"]
    if format.kind != "integer" or format.bits not in (4, 8):
        return None
    if format.sharing == "group":
        if format.group_size % 32 or format.offset == "middle":
            return None
        return KINDS[format.bits, format.offset or "zero_point"]  # symmetric: a zero point of half the range
    return None if format.offset else KINDS[format.bits, "row"]


def padded(format: NumberFormat, shape: tuple[int, int], pair: bool = False) -> tuple[int, int]:
    """Blocks of 16 rows and groups of 32 columns; a pair (gate and up) is padded half by half."""
    rows, cols = shape
    wide = 2 if pair else 1
    step = max(32, format.group_size or 32)
    return wide * -(-rows // wide // 16), -(-cols // step) * step // 32


def packed_nbytes(format: str | NumberFormat, shape: tuple[int, int], pair: bool = False) -> int:
    """Bytes of the blocks; scales of row formats (float32, 4 bytes a padded row) lie beside them."""
    format = get_format(format)
    blocks, groups = padded(format, shape, pair)
    heads = groups * 32 // format.group_size * 64 if format.sharing == "group" else 0
    return blocks * (groups * 64 * format.bits + heads)


class PackedMatrix:
    """One matrix as the kernels read it. `out`: memory for the blocks, so that a model's matrices lie in one piece."""

    def __init__(self, held: QuantizedTensor, *, pair: bool = False, bias: Tensor | None = None, out: Tensor | None = None):
        format, (rows, cols) = held.format, held.shape
        if kind_of(format) is None:
            raise BadRequest(
                f"The native kernels have none for {format.name}: they multiply bf16, int8_channel, int4_channel and INT4 or INT8 in groups of 32, 64, ...; "
                "use labkit.kernels.packed for the others."
            )
        self.format, self.shape, self.pair = format, (rows, cols), pair
        blocks, groups = padded(format, held.shape, pair)
        size = packed_nbytes(format, held.shape, pair)
        self.blocks = torch.empty(size, dtype=torch.uint8) if out is None else out[:size]
        self.blocks.copy_(_blocks(held, blocks, groups, pair).reshape(-1))
        by_row = format.sharing in ("row", "tensor")
        self.scale = _by_blocks(held.scale.float().expand(rows, 1), blocks, pair).reshape(-1) if by_row else None
        self.bias = None if bias is None else _by_blocks(bias.float()[:, None], blocks, pair).reshape(-1)
        self.struct = Matrix(self.blocks.data_ptr(), None if self.scale is None else self.scale.data_ptr(),
                             None if bias is None else self.bias.data_ptr(), rows, cols, groups, kind_of(format),
                             (format.group_size or 32) // 32, int(pair))  # fmt: skip

    def copy(self) -> PackedMatrix:
        """The same matrix with blocks of its own, at another place in memory."""
        other = PackedMatrix.__new__(PackedMatrix)
        other.__dict__ |= self.__dict__ | {"blocks": self.blocks.clone(), "struct": Matrix.from_buffer_copy(self.struct)}
        other.struct.blocks = other.blocks.data_ptr()
        return other

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.blocks, self.scale, self.bias) if t is not None)

    def matmul(self, x: Tensor) -> Tensor:
        """x [..., K] float32 -> [..., N]; activations are rounded to INT8 by 32s (integer formats) or kept (bf16)."""
        from labkit.kernels.native import library

        flat = x.reshape(-1, self.shape[1]).float().contiguous()
        out = torch.empty(flat.shape[0], self.shape[0])
        if flat.shape[0]:
            failed = library().lk_linear(ctypes.byref(self.struct), flat.data_ptr(), out.data_ptr(), flat.shape[0], torch.get_num_threads())
            if failed:
                raise MemoryError("No memory for the native product.")
        return out.view(*x.shape[:-1], self.shape[0])

    def rows(self, ids: Tensor) -> Tensor:
        """Rows as numbers [..., K]: an embedding look-up."""
        from labkit.kernels.native import library

        flat = ids.reshape(-1).long().contiguous()
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.shape[0]:
            raise IndexError(f"a row outside of 0 to {self.shape[0] - 1} was asked for")
        out = torch.empty(flat.numel(), self.shape[1])
        library().lk_rows(ctypes.byref(self.struct), flat.data_ptr(), out.data_ptr(), flat.numel())
        return out.view(*ids.shape, self.shape[1])

    def unpacked(self) -> Tensor:
        """The numbers held [N, K] float32: a matrix of gate and up in the order of its rows."""
        if not self.pair:
            return self.rows(torch.arange(self.shape[0]))
        half, blocks = self.shape[0] // 2, -(-self.shape[0] // 2 // 16)
        index = torch.arange(blocks * 32).view(blocks, 2, 16).transpose(0, 1).reshape(2, -1)[:, :half]
        whole = PackedMatrix.__new__(PackedMatrix)
        whole.__dict__ |= self.__dict__ | {"shape": (blocks * 32, self.shape[1])}
        return whole.rows(index.reshape(-1))


def _by_blocks(rows: Tensor, blocks: int, pair: bool) -> Tensor:
    """[N, X] -> [blocks, 16, X], padded with zeros; of a pair the halves' blocks alternate."""
    if not pair:
        return F.pad(rows, (0, 0, 0, blocks * 16 - rows.shape[0])).view(blocks, 16, -1).contiguous()
    halves = rows.view(2, rows.shape[0] // 2, -1)
    halves = F.pad(halves, (0, 0, 0, blocks * 8 - halves.shape[1])).view(2, blocks // 2, 16, -1)
    return halves.transpose(0, 1).reshape(blocks, 16, -1).contiguous()


def _blocks(held: QuantizedTensor, blocks: int, groups: int, pair: bool) -> Tensor:
    """The bytes, uint8 [blocks, bytes of a block]."""
    format, (rows, cols) = held.format, held.shape
    if format.kind == "float":
        columns = F.pad(_by_blocks(held.codes.view(rows, cols), blocks, pair), (0, groups * 32 - cols))  # [R, 16, K]
        lines = columns.view(blocks, 16, groups, 16, 2).permute(0, 2, 3, 1, 4)  # [R, groups, line, row, 2]
        return lines.contiguous().view(torch.uint8).view(blocks, -1)
    codes = held.unpacked_codes().to(torch.int16) + (1 << (format.bits - 1) if format.symmetric else 0)
    columns = F.pad(_by_blocks(codes.to(torch.uint8), blocks, pair), (0, groups * 32 - cols))
    lines = columns.view(blocks, 16, groups, 8, 4).permute(0, 2, 3, 1, 4)  # [R, groups, line, row, 4]
    if format.bits == 4:
        lines = lines[:, :, :4] | lines[:, :, 4:] << 4
    lines = lines.reshape(blocks, groups, -1)
    if format.sharing != "group":
        return lines.reshape(blocks, -1)
    per = format.group_size // 32
    if format.offset == "minimum":
        offset = held.offset
    else:
        zero = held.zero_points().float() if format.offset else torch.full(held.scale.shape, 1 << (format.bits - 1))
        offset = (-zero).to(torch.float16)
    heads = torch.stack([_by_blocks(held.scale.half(), blocks, pair), _by_blocks(offset.half(), blocks, pair)], 1)
    heads = heads.permute(0, 3, 1, 2).contiguous().view(torch.uint8).view(blocks, groups // per, 64)  # [R, scales, 2 * 16 * 2 B]
    return torch.cat([heads, lines.view(blocks, groups // per, -1)], -1).reshape(blocks, -1)
