"""INT4 weights in the order of PyTorch's 4-bit operators, on CPU and CUDA, and the way back.

    w[n, k] = (code[n, k] - 8) * scale[n, k // G] + middle[n, k // G]        scale and middle bfloat16, G in 32 .. 256

Every 4-bit integer format of labkit is one of these: a zero point z gives middle = (8 - z) * scale, a minimum gives
minimum + 8 * scale, a symmetric grid gives 0, and a channel repeats its scale for each group.

What is lost: scale and middle are rounded to bfloat16, so a weight moves by at most 2^-8 of 8 * scale + |middle|
(`int4_bound`), about 6 % of a step at worst. With float32 scales the CPU operator is fifty times slower.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from labkit.errors import BadRequest
from labkit.formats.integer import Grid
from labkit.formats.names import NumberFormat, get_format
from labkit.formats.tensor import QuantizedTensor, from_codes
from labkit.kernels.weight import PackedWeight

INT4_GROUPS = (256, 128, 64, 32)  # the operator's own


class Int4Pack(PackedWeight):
    """Codes in the operator's order uint8 [N/64, K, 32], scale and middle bfloat16 [K/G, N, 2].

    The order, found by packing known codes (`layout_is_known`): rows in blocks of 64; byte j of column k holds row j in
    its low nibble and row j + 32 in its high one. Held as the format `int4_g<G>_mid`, which is what `quantized` returns.
    """

    few = 32  # measured: unpacking costs as much as 32 rows

    def __init__(self, held: QuantizedTensor):
        group = int4_group(held.format, held.shape)
        super().__init__(held.shape, get_format(f"int4_g{group}_mid"))
        self.group = group
        codes, scale, middle = as_middle(held)
        rows, length = held.shape
        repeat = length // group // scale.shape[1]  # a channel's one scale serves all its groups
        both = torch.stack([scale, middle], -1).repeat_interleave(repeat, 1)  # [N, K/G, 2]
        self.register_buffer("scales", both.transpose(0, 1).contiguous().to(torch.bfloat16))
        self.register_buffer("codes", _to_int4_layout(codes, group, held.device))

    def few_rows(self, flat: Tensor) -> Tensor:
        if flat.is_cuda:
            return torch._weight_int4pack_mm(flat, self.codes, self.group, self.scales)
        return torch._weight_int4pack_mm_for_cpu(flat, self.codes, self.group, self.scales)

    def unpacked(self) -> Tensor:
        rows, length = self.shape
        if self.codes.is_cuda:  # tensor-core order: the operator itself unpacks it, from an identity
            return self.few_rows(torch.eye(length, dtype=torch.bfloat16, device=self.codes.device)).t()
        blocks = self.codes.view(rows // 64, length, 32).transpose(0, 1)  # [K, N/64, 32]
        weight = torch.empty(length, rows // 64, 2, 32, dtype=torch.bfloat16)  # W^T, in the bytes' own order
        weight[:, :, 0] = (blocks & 15).view(torch.int8).sub_(8)
        weight[:, :, 1] = (blocks >> 4).view(torch.int8).sub_(8)
        scale, middle = (part.contiguous() for part in self.scales[:, None].unbind(-1))  # [K/G, 1, N]
        weight = weight.view(length // self.group, self.group, rows)
        return torch.addcmul(middle, weight, scale, out=weight).view(length, rows).t()

    def _unpacked_codes(self) -> Tensor:
        rows, length = self.shape
        blocks = self.codes.view(rows // 64, length, 32).transpose(1, 2)  # [N/64, 32, K]
        codes = torch.empty(rows // 64, 2, 32, length, dtype=torch.uint8, device=blocks.device)
        torch.bitwise_and(blocks, 15, out=codes[:, 0])
        torch.bitwise_right_shift(blocks, 4, out=codes[:, 1])
        return codes.view(rows, length)

    def quantized(self) -> QuantizedTensor:
        if self.codes.is_cuda:
            raise BadRequest("INT4 weights on CUDA lie in tensor-core order; save the model before it is moved there.")
        scale, middle = self.scales.transpose(0, 1).contiguous().unbind(-1)
        return from_codes(
            self._unpacked_codes(), Grid(self.format, scale.contiguous(), middle.contiguous()), self.shape
        )


def as_middle(held: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Any 4-bit integer format -> codes 0..15 [N, K], and float32 scale, middle [N, groups]: w = (code - 8) * scale + middle."""
    codes, grid = held.unpacked_codes(), held.grid()
    scale = grid.scale.float()
    if held.format.symmetric:
        return (codes.to(torch.int16) + 8).to(torch.uint8), scale, torch.zeros_like(scale)
    offset = grid.offset.float()
    middle = {"zero_point": (8 - offset) * scale, "minimum": offset + 8 * scale, "middle": offset}[held.format.offset]
    return codes, scale, middle


def int4_bound(held: QuantizedTensor) -> Tensor:
    """How far a weight may move when scale and middle are rounded to bfloat16, [N, K] float32."""
    _, scale, middle = as_middle(held)
    bound = (8 * scale + middle.abs()) * 2.0**-8  # [N, groups]
    size = held.format.group_size or held.shape[-1]
    return bound.repeat_interleave(size, 1)[:, : held.shape[-1]]


def int4_group(format: NumberFormat, shape: tuple[int, ...]) -> int | None:
    """The operator's group size for this format and shape, or None where it has no fast path."""
    if format.kind != "integer" or format.bits != 4 or len(shape) != 2 or shape[0] % 64 or format.sharing == "tensor":
        return None
    if format.group_size is None:  # a channel: the longest group that divides it, the scale repeated
        return next((group for group in INT4_GROUPS if shape[1] % group == 0), None)
    return format.group_size if format.group_size in INT4_GROUPS and shape[1] % format.group_size == 0 else None


def _to_int4_layout(codes: Tensor, group: int, device: torch.device) -> Tensor:
    if device.type == "cuda":
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()  # [N, K/2], the even column in the high nibble
        return torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)


@lru_cache(maxsize=1)
def layout_is_known() -> bool:
    """Whether this build packs INT4 as `Int4Pack` reads it back (the order differs between instruction sets)."""
    try:
        codes = torch.arange(128 * 64, dtype=torch.int32).mul(7).remainder(16).view(128, 64)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1).view(2, 64, 32).transpose(1, 2)
        return torch.equal(torch.stack([packed & 15, packed >> 4], 1).view(128, 64).int(), codes)
    except (RuntimeError, AttributeError):
        return False
