"""Linear layers on packed weights: y = x W^T, read in the format's own bits.

In decode a weight is read once and used once, so its bytes are the time: a kernel that unpacks to a full matrix first has
read and written far more than it saved. PyTorch ships operators that unpack inside registers:

    Int8Pack   int8_channel   aten::_weight_int8pack_mm             bfloat16 activations and scales
    Int4Pack   int4 groups    aten::_weight_int4pack_mm(_for_cpu)   w = (code - 8) * scale + middle, both bfloat16
    Plain      every format   dequantise, then multiply: the reference, and the fall-back, which says so when chosen

Rows: one to `FEW_ROWS` go to the operator. Above (prefill), the weight is unpacked into a temporary bfloat16 matrix for one
ordinary product and thrown away: no second copy stays. Each class can give back exactly what it holds (`quantized`), so a
checkpoint is written from the packed weights.

What is lost against Plain: activations rounded to bfloat16 (2^-8 of each value) and the output too; in Int4Pack the scale
and middle as well, so a weight moves by at most 2^-8 of 8 * scale + |middle| (`int4_bound`), about 6 % of a step at worst.
When it loses: above ~16 rows arithmetic, not bytes, is the limit, and packed weights gain nothing.
"""

from __future__ import annotations

import warnings
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.formats.integer import Grid
from labkit.formats.names import NumberFormat, get_format
from labkit.formats.tensor import QuantizedTensor, from_codes

FEW_ROWS = 16
INT4_GROUPS = (256, 128, 64, 32)  # the operator's own


class PackedWeight(nn.Module):
    """A weight [N, K] in one operator's layout: its tensors are buffers, so that they move, save and count with the model."""

    fast = True

    def __init__(self, shape: tuple[int, int], format: NumberFormat):
        super().__init__()
        self.shape, self.format = tuple(shape), format

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype."""
        flat = x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()  # [M, K]
        if flat.shape[0] <= FEW_ROWS:
            out = self.few_rows(flat)
        else:
            out = F.linear(flat, self.unpacked())
        out = out.to(x.dtype)
        return (out if bias is None else out + bias).view(*x.shape[:-1], self.shape[0])

    def few_rows(self, flat: Tensor) -> Tensor:  # [M, K] -> [M, N]
        raise NotImplementedError

    def unpacked(self) -> Tensor:
        """The whole weight in bfloat16 [N, K], temporary."""
        return self.quantized().dequantize(torch.bfloat16)

    def quantized(self) -> QuantizedTensor:
        """What is held, exactly."""
        raise NotImplementedError

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Embedding look-up [..., K]."""
        return self.quantized().rows(index).to(dtype)

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device

    def _apply(self, fn, recurse=True):
        """`model.float()` and `.to(dtype)` move stored bits; they never re-interpret them."""
        for name, tensor in self._buffers.items():
            moved = fn(tensor)
            self._buffers[name] = moved if moved.dtype == tensor.dtype else tensor.to(moved.device)
        return self


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
    """Codes int8 [N, K] and one bfloat16 scale a row: the format's own bytes, nothing rearranged."""

    def __init__(self, held: QuantizedTensor):
        super().__init__(held.shape, held.format)
        self.register_buffer("codes", held.codes.view(torch.int8))
        self.register_buffer("scale", held.scale.view(-1))

    def few_rows(self, flat: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(flat, self.codes, self.scale)

    def unpacked(self) -> Tensor:
        return self.codes.to(torch.bfloat16).mul_(self.scale[:, None])

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(index, self.codes).to(dtype) * F.embedding(index, self.scale[:, None]).to(dtype)

    def quantized(self) -> QuantizedTensor:
        return QuantizedTensor(self.format, self.shape, self.codes.view(torch.uint8), self.scale[:, None])


class Int4Pack(PackedWeight):
    """Codes in the operator's order uint8 [N/64, K, 32], scale and middle bfloat16 [K/G, N, 2].

    The order, found by packing known codes (`layout_is_known`): rows in blocks of 64; byte j of column k holds row j in
    its low nibble and row j + 32 in its high one. Held as the format `int4_g<G>_mid`, which is what `quantized` returns.
    """

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
            return torch.ops.aten._weight_int4pack_mm(flat, self.codes, self.group, self.scales)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.codes, self.group, self.scales)

    def unpacked(self) -> Tensor:
        rows, length = self.shape
        if self.codes.is_cuda:  # tensor-core order: the operator itself unpacks it, from an identity
            return self.few_rows(torch.eye(length, dtype=torch.bfloat16, device=self.codes.device)).t()
        weight = self._unpacked_codes().to(torch.bfloat16).view(rows, length // self.group, self.group)
        scale, middle = self.scales.transpose(0, 1)[..., None].unbind(2)  # [N, K/G, 1]
        return weight.sub_(8).mul_(scale).add_(middle).view(rows, length)

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


def fast_path(
    format: NumberFormat, shape: tuple[int, ...], device: torch.device | str = "cpu"
) -> type[PackedWeight] | None:
    """The class that multiplies this format in its own bits on this device, or None."""
    device = torch.device(device)
    if format.name == "int8_channel" and hasattr(torch.ops.aten, "_weight_int8pack_mm"):
        return Int8Pack
    if int4_group(format, shape) and (device.type == "cuda" or layout_is_known()):
        return Int4Pack
    return None


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
        "call, slower than float32. int8_channel and int4 groups of 32, 64, 128 or 256 have one.",
        stacklevel=3,
    )


def resident_nbytes(format: NumberFormat, shape: tuple[int, ...], device: str = "cpu", kernel: str = "auto") -> int:
    """Bytes the packed layer will hold: the format's own, or the kernel's (INT4: two bfloat16 a group)."""
    if kernel == "auto" and fast_path(format, shape, device) is Int4Pack:
        return get_format(f"int4_g{int4_group(format, shape)}_mid").nbytes(shape)
    return format.nbytes(shape)
