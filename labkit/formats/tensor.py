"""Store a tensor in a number format as codes, scales and offsets, and decode it.

`round_to_nearest` uses the grid that spans each group's range. The methods of
`labkit.quant` choose better grids or codes and call `from_grid` or `from_codes`. Every
layout in memory and in files is computed from these codes, never from another layout.
Leading dimensions are rows: a tensor [experts, N, K] has experts * N rows of K.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.errors import BadRequest
from labkit.formats import floats, integer
from labkit.formats.names import NumberFormat, get_format
from labkit.formats.packing import pack, unpack

# For each scaled float format, a function from values [R, K] to the tensors of a QuantizedTensor
# by name, and the function that reverses it.
Codec = tuple[Callable[[Tensor], dict[str, Tensor]], Callable[..., Tensor]]
CODECS: dict[str, Codec] = {
    "fp8_e4m3": (floats.encode_fp8, floats.decode_fp8),
    "nvfp4": (floats.encode_nvfp4, floats.decode_nvfp4),
}


@dataclass
class QuantizedTensor:
    """A tensor [..., K] in `format`, with one code per weight.

    codes: [R, K]. Integers are int8 if the format is symmetric, else uint8. The codes of
        fp8_e4m3 and nvfp4 are their bits, uint8. Those of fp32, fp16 and bf16 are the
        values.
    scale: [R, groups] in its stored dtype.
    offset: zero points uint8 [R, groups], or minima or middles in the scale's dtype.
    tensor_scale: float32 without dimensions (NVFP4).
    """

    format: NumberFormat
    shape: tuple[int, ...]
    codes: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None
    tensor_scale: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return codes, scales and offsets by name, as far as the format has them."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def packed(self) -> dict[str, Tensor]:
        """Return the form that files contain: codes and zero points as packed bytes."""
        parts = {name: tensor.contiguous() for name, tensor in self.tensors().items()}
        if self.format.kind != "float":
            parts["codes"] = pack(self.codes, self.format.bits)
        if self.format.offset == "zero_point":
            parts["offset"] = pack(parts["offset"], self.format.bits)
        return parts

    @classmethod
    def from_packed(
        cls, format: NumberFormat, shape: tuple[int, ...], packed: Mapping[str, Tensor]
    ) -> QuantizedTensor:
        """Make a tensor from the result of `packed`."""
        parts, bits = dict(packed), format.bits
        if format.kind != "float":
            signed = format.kind == "integer" and format.symmetric
            parts["codes"] = unpack(parts["codes"], bits, shape[-1], signed)
        if format.offset == "zero_point":
            parts["offset"] = unpack(parts["offset"], bits, parts["scale"].shape[1])
        return cls(format, tuple(shape), **parts)

    @property
    def nbytes(self) -> int:
        """Bytes of `packed`."""
        return self.format.nbytes(self.shape)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def to(self, device: str | torch.device) -> QuantizedTensor:
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return QuantizedTensor(self.format, self.shape, **moved)

    @property
    def grid(self) -> integer.Grid:
        assert self.scale is not None, f"{self.format} has no grid"
        return integer.Grid(self.format, self.scale, self.offset)

    def rows(self, index: Tensor) -> Tensor:
        """Look up rows of a matrix, as an embedding does; return float32 [..., K]."""
        parts = pick_rows(self.format, self.tensors(), index.reshape(-1))
        chosen = QuantizedTensor(self.format, (index.numel(), self.shape[-1]), **parts)
        return chosen.dequantize().view(*index.shape, self.shape[-1])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values [..., K]."""
        format, codes = self.format, self.codes
        if format.kind == "float":
            values = codes
        elif format.name in CODECS:
            values = CODECS[format.name][1](**self.tensors())
        else:
            groups = integer.decode(integer.grouped(codes, format), self.grid)
            values = integer.ungrouped(groups, *codes.shape)
        return values.reshape(self.shape).to(dtype)


def pick_rows(
    format: NumberFormat, parts: Mapping[str, Tensor], index: Tensor
) -> dict[str, Tensor]:
    """Select rows of each tensor, packed or not. Scales of the whole tensor are kept."""
    whole = {"tensor_scale", *(("scale", "offset") if format.sharing == "tensor" else ())}
    return {name: part if name in whole else part[index] for name, part in parts.items()}


def finite(weight: Tensor) -> bool:
    """Return whether no value is NaN or infinite.

    The sum takes one pass and shows NaN and infinity. Only if it overflows, each value
    is checked.
    """
    return bool(weight.sum(dtype=torch.float32).isfinite()) or bool(weight.isfinite().all())


def check(weight: Tensor, format: NumberFormat) -> None:
    """Raise BadRequest for a tensor that cannot be quantized."""
    if not weight.is_floating_point():
        raise BadRequest(f"The weights are {weight.dtype}; give a floating-point dtype.")
    if weight.ndim == 0 or weight.numel() == 0:
        raise BadRequest(f"A tensor of shape {tuple(weight.shape)} has no row to quantize.")
    if not finite(weight):
        raise BadRequest(f"{format} cannot store NaN or infinity; repair the checkpoint first.")


def round_to_nearest(weight: Tensor, format: str | NumberFormat) -> QuantizedTensor:
    """Round a tensor [..., K] of any float dtype to the nearest values of `format`.

    Raises BadRequest for NaN, infinity, an empty tensor, and for weights outside the
    format's range.
    """
    format = get_format(format)
    check(weight, format)
    flat = weight.detach().reshape(-1, weight.shape[-1]).float()  # [R, K]
    shape = tuple(weight.shape)
    if format.kind == "integer":
        return from_grid(flat, integer.fit(flat, format), shape)
    if format.name in CODECS:
        return QuantizedTensor(format, shape, **CODECS[format.name][0](flat))
    return QuantizedTensor(format, shape, integer.cast(flat, format, format.name, "A weight"))


dequantize = QuantizedTensor.dequantize


def from_grid(flat: Tensor, grid: integer.Grid, shape: tuple[int, ...]) -> QuantizedTensor:
    """Round float32 weights [R, K] to a grid; return a tensor of `shape`."""
    codes = integer.encode(integer.grouped(flat, grid.format), grid)
    return from_codes(integer.ungrouped(codes, *flat.shape), grid, shape)


def from_codes(codes: Tensor, grid: integer.Grid, shape: tuple[int, ...]) -> QuantizedTensor:
    """Return a tensor of `shape` with the integer codes [R, K] on a grid."""
    assert math.prod(shape) == codes.numel(), (shape, codes.shape)
    codes = codes.to(torch.int8 if grid.format.symmetric else torch.uint8)
    return QuantizedTensor(grid.format, tuple(shape), codes, grid.scale.contiguous(), grid.offset)
