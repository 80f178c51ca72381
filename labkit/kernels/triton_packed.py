"""The packed linear layer on a GPU for the formats PyTorch has no operator for, by Triton: integers of 2 to 8 bits, and FP8.

    y[m, n] = sum over k of x[m, k] * (code[n, k] - zero) * scale[n, k // G] (+ minimum)

The stored bytes are read as they are: code k of a row starts at bit k * bits, so it lies in byte (k * bits) // 8 and
perhaps the next; both are loaded, shifted, masked. One program owns `BLOCK_N` rows of W and walks along k, up to 16 rows
of x at once, so each packed byte is fetched from memory once for all of them. Nothing is rearranged and nothing is rounded
that the format did not round. An FP8 code (e4m3) is moved into the fields of a float16, whose exponent counts from 15 instead
of 7, so its value is there divided by 256, subnormals included: no GPU needs to know FP8 for that.
When it loses: above 16 rows a matrix product of unpacked weights is faster (prefill takes that way, in PackedWeight), and
for INT4 groups PyTorch's own operator, which is laid out for tensor cores, is. Unmeasured where no GPU was at hand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.formats.names import NumberFormat
from labkit.formats.tensor import QuantizedTensor
from labkit.kernels.weight import PackedWeight

BLOCK_M, BLOCK_N, BLOCK_K = 16, 32, 64
OFFSETS = {None: 0, "zero_point": 1, "minimum": 2, "middle": 3, "fp8": 4}


@triton.jit
def bits_at(pointer, row_bytes, index, bits: tl.constexpr, inside):
    """Codes number `index` of byte rows that start at `pointer`; a code may lie across two bytes."""
    first = index * bits
    low = tl.load(pointer + first // 8, mask=inside, other=0).to(tl.int32)
    high = tl.load(pointer + first // 8 + 1, mask=inside & (first // 8 + 1 < row_bytes), other=0).to(tl.int32)
    return ((low | (high << 8)) >> (first % 8)) & ((1 << bits) - 1)


@triton.jit
def multiply(
    x, codes, scales, offsets, y, M, N, K, row_bytes, groups, offset_bytes,
    bits: tl.constexpr, group: tl.constexpr, offset: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N rows of W, all of K, up to 16 rows of x."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (n[None, :] < N) & (k[:, None] < K)  # [BLOCK_K, BLOCK_N]
        code = bits_at(codes + n[None, :] * row_bytes, row_bytes, k[:, None], bits, inside)
        place = n[None, :] * groups + k[:, None] // group
        scale = tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
        if offset == 0:  # two's complement
            weight = (code - ((code >> (bits - 1)) << bits)).to(tl.float32) * scale
        elif offset == 4:
            half = (((code & 127) << 7) | ((code & 128) << 8)).to(tl.int16).to(tl.float16, bitcast=True)
            weight = half.to(tl.float32) * 256.0 * scale
        elif offset == 1:
            zero = bits_at(offsets + n[None, :] * offset_bytes, offset_bytes, k[:, None] // group, bits, inside)
            weight = (code - zero).to(tl.float32) * scale
        else:
            shift = 0 if offset == 2 else 1 << (bits - 1)
            weight = (code - shift).to(tl.float32) * scale
            weight += tl.load(offsets + place, mask=inside, other=0.0).to(tl.float32)
        rows = tl.load(x + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        total += tl.dot(rows.to(tl.float32), weight, input_precision="ieee")
    tl.store(y + m[:, None] * N + n[None, :], total.to(y.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def supported(format: NumberFormat, shape: tuple[int, ...]) -> bool:
    """Whether the kernel multiplies this format: integer codes in groups or rows of a matrix, or FP8."""
    known = format.kind == "integer" or format.name == "fp8_e4m3"
    return known and format.sharing in ("group", "row") and len(shape) == 2


class TritonPack(PackedWeight):
    """Codes, scales and offsets exactly as the format stores them."""

    def __init__(self, held: QuantizedTensor):
        super().__init__(held.shape, held.format)
        for name, tensor in held.tensors().items():
            self.register_buffer(name, tensor)

    def few_rows(self, flat: Tensor) -> Tensor:
        (N, K), format = self.shape, self.format
        y = torch.empty(len(flat), N, dtype=flat.dtype, device=flat.device)
        offset = self.codes if format.offset is None else self.offset
        multiply[(triton.cdiv(N, BLOCK_N),)](
            flat, self.codes, self.scale, offset, y, len(flat), N, K,
            self.codes.shape[1], self.scale.shape[1], offset.shape[1],
            format.bits, format.group_size or K, OFFSETS["fp8" if format.kind == "scaled_float" else format.offset], BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        return y

    def quantized(self) -> QuantizedTensor:
        return QuantizedTensor(self.format, self.shape, **dict(self._buffers))
