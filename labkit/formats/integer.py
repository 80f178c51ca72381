"""Integer grids: choosing scales and offsets, rounding to codes, and back.

    symmetric    scale = max|w| / (2^(bits-1) - 1)           code = clamp(round(w / scale))
    zero point   scale = (hi - lo) / (2^bits - 1)            code = clamp(round(w / scale) + zero_point)
    minimum      scale = (hi - lo) / (2^bits - 1)            code = clamp(round((w - minimum) / scale))
                 (zero point only: lo <= 0 <= hi, so that zero is exact)

Three rules, each a bug of well-known projects: the guard is on the scale *as stored* (the float16 scale of a channel of
1e-7 would be 0), codes are clamped before the cast (a raw cast wraps 200 to -56), and the last group may be short.

Loss: at most half a stored scale a weight, plus the rounding of a float offset. A stored scale never underflows: below
float16's normal numbers it is rounded *up* to the next multiple of 2^-24, so nothing is clipped, and a zero stays zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.errors import BadRequest
from labkit.formats.names import NumberFormat

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
_SMALLEST = {"fp16": 2.0**-24, "bf16": 2.0**-126, "fp32": 2.0**-126}
_NORMAL = {"fp16": 2.0**-14, "bf16": 2.0**-126, "fp32": 2.0**-126}


@dataclass
class Grid:
    """Scales [R, groups] in their stored dtype; offset: None, zero points (uint8) or minima/middles (stored dtype)."""

    format: NumberFormat
    scale: Tensor
    offset: Tensor | None

    def columns(self, start: int, stop: int) -> "Grid":
        """The grid of weight columns start..stop, one scale a column: what an algorithm that walks columns reads."""
        group = self.format.group_size
        index = torch.arange(start, stop, device=self.scale.device) // group if group else [0] * (stop - start)
        take = lambda t: None if t is None else t[:, index]  # noqa: E731
        return Grid(self.format, take(self.scale), take(self.offset))


def grouped(weight: Tensor, format: NumberFormat) -> Tensor:
    """[R, K] -> [R, groups, G] (one group a row or tensor too). A short last group repeats its own last value,
    which changes neither its minimum nor its maximum."""
    rows, length = weight.shape
    if format.sharing == "tensor":
        return weight.reshape(1, 1, -1)
    if format.sharing == "row":
        return weight[:, None, :]
    missing = -length % format.group_size
    if missing:
        weight = torch.cat([weight, weight[:, -1:].expand(rows, missing)], 1)
    return weight.view(rows, -1, format.group_size)


def store(scale: Tensor, format: NumberFormat) -> Tensor:
    """Scales in their stored dtype, guarded there: never zero, never infinite, tiny ones rounded up."""
    name, dtype = format.scale_dtype, DTYPES[format.scale_dtype]
    if scale.numel() and float(scale.max()) > torch.finfo(dtype).max:
        raise BadRequest(
            f"A scale of {float(scale.max()):.3g} does not fit {format.name}'s {dtype}; take a channel format (float32 scales) or smaller weights."
        )
    step = _SMALLEST[name]
    tiny = (torch.ceil(scale / step) * step).clamp(min=step)
    return torch.where(scale < _NORMAL[name], tiny, scale).to(dtype)


def grid_from_range(low: Tensor, high: Tensor, format: NumberFormat) -> Grid:
    """The grid of groups whose weights span low..high, both float32 [R, groups]."""
    bits = format.bits
    if format.symmetric:
        reach = torch.maximum(low.abs(), high.abs())
        return Grid(format, store(reach / ((1 << (bits - 1)) - 1), format), None)
    levels = (1 << bits) - 1
    if format.offset == "zero_point":
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = store((high - low) / levels, format)
        return Grid(format, scale, torch.round(-low / scale.float()).clamp(0, levels).to(torch.uint8))
    scale = store((high - low) / levels, format)
    offset = low if format.offset == "minimum" else low + (1 << (bits - 1)) * scale.float()
    if offset.numel() and float(offset.abs().max()) > torch.finfo(scale.dtype).max:
        raise BadRequest(
            f"An offset of {float(offset.abs().max()):.3g} does not fit {format.name}'s {scale.dtype}; take smaller weights."
        )
    return Grid(format, scale, offset.to(scale.dtype))


def fit(weight: Tensor, format: NumberFormat) -> Grid:
    """The grid of float32 weights [R, K], from each group's smallest and largest value."""
    low, high = grouped(weight, format).aminmax(dim=-1)  # [R, groups]
    return grid_from_range(low, high, format)


def encode(groups: Tensor, grid: Grid) -> Tensor:
    """Float32 [..., G] with the grid's scales [...] -> integer codes, clamped, int16."""
    format, scale = grid.format, grid.scale.float()[..., None]
    lowest, highest = format.code_range
    if format.offset == "minimum":
        codes = torch.round((groups - grid.offset.float()[..., None]) / scale)
    elif format.offset == "middle":
        codes = torch.round((groups - grid.offset.float()[..., None]) / scale) + (1 << (format.bits - 1))
    else:
        zero = 0.0 if grid.offset is None else grid.offset.float()[..., None]
        codes = torch.round(groups / scale) + zero
    return codes.clamp_(lowest, highest).to(torch.int16)


def decode(codes: Tensor, grid: Grid) -> Tensor:
    """Codes [..., G] and the grid's scales [...] -> float32."""
    format, scale = grid.format, grid.scale.float()[..., None]
    if format.symmetric:
        return codes.float() * scale
    offset = grid.offset.float()[..., None]
    if format.offset == "zero_point":
        return (codes.float() - offset) * scale
    shift = 0 if format.offset == "minimum" else 1 << (format.bits - 1)
    return (codes.float() - shift) * scale + offset


def round_to_grid(columns: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Float32 [R, C] with one scale a column (`Grid.columns`) -> (codes int16 [R, C], their values float32 [R, C])."""
    codes = encode(columns[..., None], grid)
    return codes[..., 0], decode(codes, grid)[..., 0]
