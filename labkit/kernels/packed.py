"""Linear layers on packed weights: y = x W^T, read in the format's own bits.

In decode a weight is read once and used once, so its bytes are the time: a kernel that unpacks to a full matrix first has
read and written far more than it saved. PyTorch ships operators that unpack inside registers:

    Int8Pack   int8_channel   aten::_weight_int8pack_mm             bfloat16 activations and scales
    Int4Pack   int4 groups    aten::_weight_int4pack_mm(_for_cpu)   w = (code - 8) * scale + middle, both bfloat16
    TritonPack other integer formats, on CUDA, where Triton is installed (labkit.kernels.triton_packed)
    Plain      every format   dequantise, then multiply: the reference, and the fall-back, which says so when chosen

Rows: one to `few` (16 to 32) go to the operator. Above (prefill), the weight is unpacked into a temporary bfloat16 matrix for one
ordinary product and thrown away: no second copy stays. Each class can give back exactly what it holds (`quantized`), so a
checkpoint is written from the packed weights.

What is lost against Plain: activations rounded to bfloat16 (2^-8 of each value) and the output too; in Int4Pack the scale
and middle as well, so a weight moves by at most 2^-8 of 8 * scale + |middle| (`int4_bound`), about 6 % of a step at worst.
When it loses: above ~16 rows arithmetic, not bytes, is the limit, and packed weights gain nothing.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.errors import BadRequest
from labkit.formats.names import NumberFormat, get_format
from labkit.formats.tensor import QuantizedTensor
from labkit.kernels import int4
from labkit.kernels.int4 import Int4Pack, int4_bound, int4_group
from labkit.kernels.weight import FEW_ROWS, PackedWeight

__all__ = [
    "FEW_ROWS", "Int4Pack", "Int8Pack", "PackedWeight", "Plain",
    "fast_path", "int4_bound", "pack_weight", "resident_nbytes", "say_no_fast_path",
]  # fmt: skip


INT8_STEP = 16  # codes that the operator reads at once


class Plain(PackedWeight):
    """Any format: dequantise on each call and multiply. float32 in, float32 weights; bf16 and fp16 formats as they are."""

    fast = False

    def __init__(self, held: QuantizedTensor):
        super().__init__(held.shape, held.format)
        for name, tensor in held.tensors().items():
            self.register_buffer(name, tensor)
        self.direct = held.format.kind == "float"  # the numbers themselves: nothing to unpack

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.direct:
            out = F.linear(x.to(self.codes.dtype), self.codes).to(x.dtype)
        else:
            out = F.linear(x, self.quantized().dequantize(x.dtype))
        return out if bias is None else out + bias

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(index, self.codes).to(dtype) if self.direct else super().rows(index, dtype)

    def quantized(self) -> QuantizedTensor:
        return QuantizedTensor(self.format, self.shape, **dict(self._buffers))


class Int8Pack(PackedWeight):
    """Codes int8 [N, K] and one bfloat16 scale a row: the format's own bytes, nothing rearranged.

    The CPU operator reads 16 codes at a time from addresses that are multiples of 16 and checks neither: other row
    lengths give wrong numbers or end the process (`fast_path` refuses them), and tensors mapped from a file lie anywhere.
    """

    few = 20  # measured: unpacking costs as much as 20 rows

    def __init__(self, held: QuantizedTensor):
        super().__init__(held.shape, held.format)
        codes = held.codes.view(torch.int8)
        self.register_buffer("codes", codes if codes.data_ptr() % INT8_STEP == 0 else codes.clone())
        self.register_buffer("scale", held.scale.view(-1))

    def few_rows(self, flat: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(flat, self.codes, self.scale)

    def unpacked(self) -> Tensor:
        return self.codes.to(torch.bfloat16).mul_(self.scale[:, None])

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(index, self.codes).to(dtype) * F.embedding(index, self.scale[:, None]).to(dtype)

    def quantized(self) -> QuantizedTensor:
        return QuantizedTensor(self.format, self.shape, self.codes.view(torch.uint8), self.scale[:, None])


def fast_path(
    format: NumberFormat, shape: tuple[int, ...], device: torch.device | str = "cpu"
) -> type[PackedWeight] | None:
    """The class that multiplies this format in its own bits on this device, or None."""
    cuda = torch.device(device).type == "cuda"
    if (
        format.name == "int8_channel"
        and shape[-1] % INT8_STEP == 0
        and hasattr(torch.ops.aten, "_weight_int8pack_mm")
        and (not cuda or has_cuda_int8())
    ):
        return Int8Pack
    if int4_group(format, shape) and (cuda or int4.layout_is_known()):
        return Int4Pack
    if cuda and importlib.util.find_spec("triton"):
        from labkit.kernels.triton_packed import TritonPack, supported

        return TritonPack if supported(format, shape) else None
    return None


@cache
def has_cuda_int8() -> bool:
    """PyTorch has the INT8 operator on CUDA in newer releases only."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_weight_int8pack_mm", "CUDA")


def pack_weight(held: QuantizedTensor, kernel: str = "auto") -> PackedWeight:
    """`auto`: the fast path, or Plain and a sentence that there is none here. `plain`: the reference, silently."""
    if kernel not in ("auto", "plain"):
        raise BadRequest(
            f"There is no kernel {kernel!r}; choose 'auto' (packed where this machine can) or 'plain' (the reference)."
        )
    if kernel == "plain" or held.format.kind == "float":
        return Plain(held)
    chosen = fast_path(held.format, held.shape, held.device)
    if chosen is None:
        say_no_fast_path(held.format.name, held.device.type)
        return Plain(held)
    return chosen(held)


@cache
def say_no_fast_path(name: str, device: str) -> None:
    """Once a format and device in a process."""
    warnings.warn(
        f"{name} has no packed kernel for its shapes on this {device}: weights are small in memory but unpacked on every "
        "call, slower than float32. int8_channel with rows of a multiple of 16 weights and int4 groups of 32, 64, 128 or "
        "256 have one.",
        stacklevel=3,
    )


def resident_nbytes(format: NumberFormat, shape: tuple[int, ...], device: str = "cpu", kernel: str = "auto") -> int:
    """Bytes the packed layer will hold: the format's own, or the kernel's (INT4: two bfloat16 a group)."""
    if kernel == "auto" and fast_path(format, shape, device) is Int4Pack:
        return get_format(f"int4_g{int4_group(format, shape)}_mid").nbytes(shape)
    return format.nbytes(shape)
