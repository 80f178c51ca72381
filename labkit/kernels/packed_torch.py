"""Multiply by packed weights with PyTorch's operators: INT8 by channel, INT4 in groups.

    Int8Pack   int8_channel   aten::_weight_int8pack_mm             bfloat16 activations and scales
    Int4Pack   int4 groups    aten::_weight_int4pack_mm(_for_cpu)

    w[n, k] = (code[n, k] - 8) * scale[n, k // G] + middle[n, k // G]      G in 32, 64, 128, 256

Each 4-bit integer format of labkit can be written in this form. With a zero point z,
middle is (8 - z) * scale. With a minimum, it is minimum + 8 * scale. On a symmetric
grid it is 0. A format by channel repeats its scale for each group.

Loss compared with `Plain`: activations and outputs are rounded to bfloat16 (2^-8 of
each value). Int4Pack also rounds scale and middle to bfloat16, so a weight changes by
at most 2^-8 of 8 * scale + |middle|, in the worst case about 6 % of a step. With
float32 scales the CPU operator is fifty times slower.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.errors import BadRequest
from labkit.formats.names import NumberFormat, get_format
from labkit.formats.tensor import QuantizedTensor
from labkit.kernels.packed_weight import PackedWeight

INT8_STEP = 16  # codes that the INT8 operator reads at once
INT4_GROUPS = (256, 128, 64, 32)  # group sizes of the INT4 operator


class Int8Pack(PackedWeight):
    """Codes int8 [N, K] and one bfloat16 scale per row [N]: the format's own bytes.

    The CPU operator reads 16 codes at a time, from addresses that are multiples of 16,
    but does not check this. Other row lengths give wrong numbers or crash the process.
    Tensors in a mapped file can start at any address and are copied if necessary.
    """

    few = 20  # measured: unpacking costs as much as 20 rows
    codes: Tensor
    scale: Tensor

    def __init__(self, quantized: QuantizedTensor):
        super().__init__(quantized)
        codes = quantized.codes
        codes = codes.clone() if codes.data_ptr() % INT8_STEP else codes
        self._store(codes=codes, scale=quantized.grid.scale.view(-1))

    @classmethod
    def supports(cls, format: NumberFormat, shape: tuple[int, ...], device: torch.device) -> bool:
        fits = format.name == "int8_channel" and len(shape) == 2 and shape[-1] % INT8_STEP == 0
        return fits and _has_int8_operator(device.type.upper())

    def few_rows(self, flat: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(flat, self.codes, self.scale)

    def unpacked(self) -> Tensor:
        return self.codes.to(torch.bfloat16).mul_(self.scale[:, None])

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        scale = F.embedding(index, self.scale[:, None])
        return F.embedding(index, self.codes).to(dtype) * scale.to(dtype)

    def quantized(self) -> QuantizedTensor:
        return QuantizedTensor(self.format, self.shape, self.codes, self.scale[:, None])


@cache
def _has_int8_operator(device: str) -> bool:
    """Return True if PyTorch has the INT8 operator; on CUDA only newer releases have it."""
    name = "_weight_int8pack_mm"
    return hasattr(torch.ops.aten, name) and (
        device != "CUDA" or torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", device)
    )


class Int4Pack(PackedWeight):
    """INT4 codes, scales and middles in the layout of the operator.

    Codes are uint8 [N/64, K, 32]; scale and middle are bfloat16 [K/G, N, 2]. Rows form
    blocks of 64. In a block, byte j of column k has row j in its low nibble and row j +
    32 in its high nibble. PyTorch does not document this order; `layout_is_known`
    checks it. `quantized` returns the stored format, `int4_g<G>_mid`.
    """

    few = 32  # measured: unpacking costs as much as 32 rows
    codes: Tensor
    scales: Tensor

    def __init__(self, quantized: QuantizedTensor):
        super().__init__(quantized)
        self.format, self.group = _stored_format(self.format, self.shape)
        codes, scale, middle = as_middle(quantized)
        # By channel, all groups have the same scale.
        repeat = self.shape[1] // self.group // scale.shape[1]
        scales = torch.stack([scale, middle], -1).repeat_interleave(repeat, 1)  # [N, K/G, 2]
        if codes.is_cuda:  # [N, K/2], the even column in the high nibble
            pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()
            codes = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
        else:
            codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
        scales = scales.transpose(0, 1).contiguous().to(torch.bfloat16)
        self._store(scales=scales, codes=codes)

    @classmethod
    def supports(cls, format: NumberFormat, shape: tuple[int, ...], device: torch.device) -> bool:
        fits = format.kind == "integer" and format.bits == 4 and format.sharing != "tensor"
        if not fits or len(shape) != 2 or shape[0] % 64 or _group(format, shape) is None:
            return False
        return device.type == "cuda" or layout_is_known()

    @classmethod
    def resident_nbytes(cls, format: NumberFormat, shape: tuple[int, ...]) -> int:
        return _stored_format(format, shape)[0].nbytes(shape)

    def few_rows(self, flat: Tensor) -> Tensor:
        cpu, cuda = torch._weight_int4pack_mm_for_cpu, torch._weight_int4pack_mm
        return (cuda if flat.is_cuda else cpu)(flat, self.codes, self.group, self.scales)

    def unpacked(self) -> Tensor:
        (rows, length), group = self.shape, self.group
        if self.codes.is_cuda:  # in the order of tensor cores: multiply by an identity matrix
            return self.few_rows(torch.eye(length, dtype=torch.bfloat16, device=self.device)).t()
        blocks = self.codes.view(rows // 64, length, 32).transpose(0, 1)  # [K, N/64, 32]
        weight = torch.empty(length, rows // 64, 2, 32, dtype=torch.bfloat16)  # transposed
        weight[:, :, 0] = (blocks & 15).view(torch.int8).sub_(8)
        weight[:, :, 1] = (blocks >> 4).view(torch.int8).sub_(8)
        scale, middle = (part.contiguous() for part in self.scales[:, None].unbind(-1))
        weight = weight.view(length // group, group, rows)  # scale and middle are [K/G, 1, N]
        return torch.addcmul(middle, weight, scale, out=weight).view(length, rows).t()

    def quantized(self) -> QuantizedTensor:
        if self.codes.is_cuda:
            raise BadRequest("INT4 codes cannot be read on CUDA; save the model on the CPU.")
        scale, middle = (part.t().contiguous() for part in self.scales.unbind(-1))
        codes = _row_major(self.codes, *self.shape)
        return QuantizedTensor(self.format, self.shape, codes, scale, middle)


def as_middle(quantized: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert 4-bit integers to codes 0..15 [N, K], scale and middle [N, groups]."""
    format, codes, scale = quantized.format, quantized.codes, quantized.grid.scale.float()
    if quantized.offset is None:
        return (codes + 8).view(torch.uint8), scale, torch.zeros_like(scale)
    offset = quantized.offset.float()
    if format.offset == "zero_point":
        return codes, scale, (8 - offset) * scale
    return codes, scale, offset if format.offset == "middle" else offset + 8 * scale


def _row_major(codes: Tensor, rows: int, length: int) -> Tensor:
    """Convert the CPU layout to codes [N, K]."""
    blocks = codes.view(rows // 64, length, 32).transpose(1, 2)  # [N/64, 32, K]
    return torch.stack([blocks & 15, blocks >> 4], 1).view(rows, length)


def _group(format: NumberFormat, shape: tuple[int, ...]) -> int | None:
    """Return the group size for the operator (by channel: the largest that fits), or None."""
    sizes = [size for size in INT4_GROUPS if shape[1] % size == 0]
    return next((size for size in sizes if format.group_size in (None, size)), None)


def _stored_format(format: NumberFormat, shape: tuple[int, ...]) -> tuple[NumberFormat, int]:
    group = _group(format, shape)
    assert group is not None, (format, shape)
    return get_format(f"int4_g{group}_mid"), group


@cache
def layout_is_known() -> bool:
    """Return True if PyTorch packs INT4 on this CPU in the order of `Int4Pack`."""
    codes = torch.arange(128 * 64, dtype=torch.int32).mul(7).remainder(16).view(128, 64)
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    except (RuntimeError, AttributeError):
        return False
    return torch.equal(_row_major(packed, 128, 64).int(), codes)
