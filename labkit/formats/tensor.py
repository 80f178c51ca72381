"""A tensor held in a number format: packed codes, scales, offsets, and the way back.

`quantize` rounds to nearest on the grid of each group's own range; the methods of `labkit.quant` choose grids or codes
more cleverly and end in `from_codes`, so every method is stored, loaded and multiplied in the same way.
Leading dimensions are rows: a [experts, N, K] tensor is experts * N rows of K.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.errors import BadRequest
from labkit.formats import floats, integer
from labkit.formats.names import NumberFormat, get_format
from labkit.formats.packing import pack, unpack


@dataclass
class QuantizedTensor:
    """`codes` uint8 [R, bytes] (the plain values for fp32, fp16, bf16); `scale` [R, groups] in its stored dtype;
    `offset` packed zero points uint8 [R, bytes] or minima [R, groups]; `tensor_scale` float32 [] (NVFP4)."""

    format: NumberFormat
    shape: tuple[int, ...]
    codes: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None
    tensor_scale: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by name; their bytes are `format.nbytes(shape)`."""
        named = {"codes": self.codes, "scale": self.scale, "offset": self.offset, "tensor_scale": self.tensor_scale}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def to(self, device) -> "QuantizedTensor":
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return QuantizedTensor(self.format, self.shape, **moved)

    def unpacked_codes(self) -> Tensor:
        """Integer codes [R, K], signed where the format is symmetric."""
        signed = self.format.kind == "integer" and self.format.symmetric
        return unpack(self.codes, self.format.bits, self.shape[-1], signed)

    def zero_points(self) -> Tensor:
        """Zero points uint8 [R, groups], unpacked."""
        return unpack(self.offset, self.format.bits, self.scale.shape[1])

    def grid(self) -> integer.Grid:
        offset = self.zero_points() if self.format.offset == "zero_point" else self.offset
        return integer.Grid(self.format, self.scale, offset)

    def rows(self, index: Tensor) -> Tensor:
        """Dequantised rows [..., K] of a matrix: an embedding look-up that never unpacks the whole table."""
        flat = index.reshape(-1)
        pick = lambda t: t if t is None or t.shape[0] == 1 != self.codes.shape[0] else t[flat]  # noqa: E731
        some = QuantizedTensor(
            self.format,
            (flat.numel(), self.shape[-1]),
            self.codes[flat],
            pick(self.scale),
            pick(self.offset),
            self.tensor_scale,
        )
        return some.dequantize().view(*index.shape, self.shape[-1])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers held, [..., K], float32 unless asked."""
        dtype, format = dtype or torch.float32, self.format
        if format.kind == "float":
            return self.codes.view(self.shape).to(dtype)
        if format.name == "fp8_e4m3":
            return floats.decode_fp8(self.codes, self.scale).view(self.shape).to(dtype)
        codes = self.unpacked_codes()
        if format.name == "nvfp4":
            return floats.decode_nvfp4(codes, self.scale, self.tensor_scale).view(self.shape).to(dtype)
        groups = integer.grouped(codes, format)
        values = integer.decode(groups, self.grid()).reshape(codes.shape[0], -1)[:, : self.shape[-1]]
        return values.reshape(self.shape).to(dtype)


def finite(weight: Tensor) -> bool:
    """Whether no value is NaN or infinite. One pass: a sum keeps either; a sum that overflows is looked into."""
    return bool(torch.isfinite(weight.sum(dtype=torch.float32))) or bool(torch.isfinite(weight).all())


def check(weight: Tensor, format: NumberFormat) -> None:
    """Refuse what has no meaningful codes, before any work."""
    if not weight.is_floating_point():
        raise BadRequest(f"Only floating-point weights can be quantised, and this tensor is {weight.dtype}.")
    if weight.ndim == 0 or weight.numel() == 0:
        raise BadRequest(f"A tensor of shape {tuple(weight.shape)} holds no row to quantise; pass [..., inputs].")
    if not finite(weight):
        raise BadRequest(
            f"The weights contain NaN or infinity and cannot be held in {format.name}; repair the checkpoint first."
        )


def quantize(weight: Tensor, format: str | NumberFormat) -> QuantizedTensor:
    """Round to nearest: [..., K] of any float dtype -> QuantizedTensor."""
    format = get_format(format)
    check(weight, format)
    flat = weight.detach().reshape(-1, weight.shape[-1]).float()  # [R, K]
    shape = tuple(weight.shape)
    if format.kind == "float":
        dtype = integer.DTYPES[format.name]
        if float(flat.abs().max()) > torch.finfo(dtype).max:
            raise BadRequest(
                f"A weight of {float(flat.abs().max()):.3g} does not fit {format.name}; bf16 has float32's range."
            )
        return QuantizedTensor(format, shape, flat.to(dtype))
    if format.name == "fp8_e4m3":
        return QuantizedTensor(format, shape, *floats.encode_fp8(flat))
    if format.name == "nvfp4":
        nibbles, scales, tensor_scale = floats.encode_nvfp4(flat)
        return QuantizedTensor(format, shape, pack(nibbles, 4), scales, None, tensor_scale)
    grid = integer.fit(flat, format)
    return from_grid(flat, grid, shape)


def from_grid(flat: Tensor, grid: integer.Grid, shape: tuple[int, ...]) -> QuantizedTensor:
    """Round float32 weights [R, K] to a given grid."""
    codes = integer.encode(integer.grouped(flat, grid.format), grid)
    return from_codes(codes.reshape(flat.shape[0], -1)[:, : flat.shape[1]], grid, shape)


def from_codes(codes: Tensor, grid: integer.Grid, shape: tuple[int, ...]) -> QuantizedTensor:
    """Integer codes [R, K] on a grid, packed."""
    format = grid.format
    offset = pack(grid.offset, format.bits) if format.offset == "zero_point" else grid.offset
    if math.prod(shape) != codes.numel():
        raise BadRequest(f"{codes.numel()} codes cannot have the shape {shape}.")
    return QuantizedTensor(format, tuple(shape), pack(codes, format.bits), grid.scale.contiguous(), offset)
