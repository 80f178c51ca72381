"""Multiply by packed weights on a GPU with Triton: integers of 2 to 8 bits, and FP8.

    y[m, n] = sum over k of x[m, k] * (code[n, k] - zero) * scale[n, k // G] (+ minimum)

This kernel serves the formats for which PyTorch has no operator. It reads the stored
bytes: code k of a row starts at bit k * bits, so it is in byte (k * bits) // 8 and
sometimes also in the next one. The kernel loads both bytes, shifts and masks. One
program computes BLOCK_N rows of W for up to 16 rows of x, in steps along k, so it
fetches each packed byte from memory once. The result has no rounding beyond that of the
format.

The bits of an FP8 code (e4m3) are moved into the fields of a float16. Its exponent has
a bias of 15 instead of 7, so the value is too small by a factor of 256, also for
subnormals. The GPU does not need FP8 instructions.

When it loses: above 16 rows, unpacking the weights first is faster (`PackedWeight` does
so). For INT4 groups, PyTorch's operator should be faster, because its layout fits
tensor cores. Neither has been measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.formats.names import NumberFormat
from labkit.kernels.packed_weight import PortableWeight

BLOCKS = (16, 32, 64)  # rows of x, rows of W, columns that a program works on at once
OFFSETS = {None: 0, "zero_point": 1, "minimum": 2, "middle": 3, "fp8": 4}


@triton.jit
def bits_at(pointer, row_bytes, index, bits: tl.constexpr, inside):
    """Read the codes `index` of rows of bytes; a code can cross two bytes."""
    byte, shift = index * bits // 8, index * bits % 8
    low = tl.load(pointer + byte, mask=inside, other=0).to(tl.int32)
    more = inside & (byte + 1 < row_bytes)
    high = tl.load(pointer + byte + 1, mask=more, other=0).to(tl.int32)
    return ((low | (high << 8)) >> shift) & ((1 << bits) - 1)


@triton.jit
def multiply(
    x,
    codes,
    scales,
    offsets,
    y,
    M,
    N,
    K,
    bits: tl.constexpr,
    group: tl.constexpr,
    offset: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute one program: BLOCK_N rows of W, the whole of K, up to 16 rows of x."""
    row_bytes, groups = (K * bits + 7) // 8, (K + group - 1) // group
    offset_bytes = (groups * bits + 7) // 8
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = (n[None, :] < N) & (k[:, None] < K)  # [BLOCK_K, BLOCK_N]
        code = bits_at(codes + n[None, :] * row_bytes, row_bytes, k[:, None], bits, inside)
        place = n[None, :] * groups + k[:, None] // group
        scale = tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
        if offset == 0:  # two's complement
            weight = (code - ((code >> (bits - 1)) << bits)).to(tl.float32) * scale
        elif offset == 4:
            half = (((code & 127) << 7) | ((code & 128) << 8)).to(tl.int16)
            weight = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0 * scale
        elif offset == 1:
            start = offsets + n[None, :] * offset_bytes
            zero = bits_at(start, offset_bytes, k[:, None] // group, bits, inside)
            weight = (code - zero).to(tl.float32) * scale
        else:
            shift = 0 if offset == 2 else 1 << (bits - 1)
            weight = (code - shift).to(tl.float32) * scale
            weight += tl.load(offsets + place, mask=inside, other=0.0).to(tl.float32)
        known = (m[:, None] < M) & (k[None, :] < K)
        rows = tl.load(x + m[:, None] * K + k[None, :], mask=known, other=0.0)
        total += tl.dot(rows.to(tl.float32), weight, input_precision="ieee")
    known = (m[:, None] < M) & (n[None, :] < N)
    tl.store(y + m[:, None] * N + n[None, :], total.to(y.dtype.element_ty), mask=known)


class TritonPack(PortableWeight):
    """A weight with codes, scales and offsets exactly as the format stores them."""

    @classmethod
    def supports(cls, format: NumberFormat, shape: tuple[int, ...], device: torch.device) -> bool:
        """Return True for integers and FP8 with scales per group or row of a matrix."""
        known = format.kind == "integer" or format.name == "fp8_e4m3"
        return known and format.sharing in ("group", "row") and len(shape) == 2

    def few_rows(self, flat: Tensor) -> Tensor:
        (N, K), format = self.shape, self.format
        y = torch.empty(len(flat), N, dtype=flat.dtype, device=flat.device)
        offset = self.packed().get("offset", self.codes)
        kind = "fp8" if format.kind == "scaled_float" else format.offset
        tensors = (flat, self.codes, self.scale, offset, y)
        code = (format.bits, format.group_size or K, OFFSETS[kind])
        multiply[(triton.cdiv(N, BLOCKS[1]),)](*tensors, len(flat), N, K, *code, *BLOCKS)
        return y
