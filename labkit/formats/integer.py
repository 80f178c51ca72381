"""Integer grids: choose scales and offsets, encode weights as codes, and decode them.

    symmetric    scale = max|w| / (2^(bits-1) - 1)     code = clamp(round(w / scale))
    zero point   scale = (high - low) / (2^bits - 1)   code = clamp(round(w / scale) + zero_point)
    minimum      scale = (high - low) / (2^bits - 1)   code = clamp(round((w - minimum) / scale))
                 (zero point only: low <= 0 <= high, which makes zero exact)

Three rules avoid bugs of well-known projects. The *stored* scale is checked for 0,
because in float16 the scale of a channel of 1e-7 would be 0. Codes are clamped before
the cast, because a cast alone turns 200 into -56. The last group may be short.

Maximum error: half a stored scale per weight, plus the rounding of a float offset. A
stored scale never underflows: below float16's normal numbers it is rounded *up* to a
multiple of 2^-24, which clips no weight. A zero stays zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.errors import BadRequest
from labkit.formats.names import NumberFormat, torch_dtype


@dataclass
class Grid:
    """The scales and offsets that turn codes of `format` into values.

    scale: [R, groups] in its stored dtype.
    offset: None, zero points uint8 [R, groups], or minima or middles in the scale's
        dtype.
    """

    format: NumberFormat
    scale: Tensor
    offset: Tensor | None

    def columns(self, start: int, stop: int) -> Grid:
        """Return the grid of columns start to stop, with one scale per column."""
        index = torch.arange(start, stop, device=self.scale.device)
        index = index // (self.format.group_size or stop)
        offset = None if self.offset is None else self.offset[:, index]
        return Grid(self.format, self.scale[:, index], offset)


def grouped(weight: Tensor, format: NumberFormat) -> Tensor:
    """View [R, K] as [R, groups, G]; the weights that share a scale form a group.

    A short last group is filled with its last value, which changes neither its minimum
    nor its maximum.
    """
    if format.group_size is None:
        return weight.reshape(1, 1, -1) if format.sharing == "tensor" else weight[:, None, :]
    missing = -weight.shape[1] % format.group_size
    if missing:
        weight = torch.cat([weight, weight[:, -1:].expand(-1, missing)], 1)
    return weight.view(len(weight), -1, format.group_size)


def ungrouped(groups: Tensor, rows: int, length: int) -> Tensor:
    """Undo `grouped`: return [R, groups, G] as [R, K]."""
    return groups.reshape(rows, -1)[:, :length]


def cast(values: Tensor, format: NumberFormat, dtype: str | None, what: str) -> Tensor:
    """Cast to a dtype of the format. Raises BadRequest if a value is too large."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    if dtype is None or largest > torch.finfo(torch_dtype(dtype)).max:
        raise BadRequest(
            f"{what} of {largest:.3g} does not fit {format}; use bf16 or int8_channel."
        )
    return values.to(torch_dtype(dtype))


def store(scale: Tensor, format: NumberFormat) -> Tensor:
    """Return scales in their stored dtype. They are never zero: tiny ones are rounded up."""
    smallest, normal = (2.0**-24, 2.0**-14) if format.scale_dtype == "fp16" else (2.0**-126,) * 2
    tiny = (torch.ceil(scale / smallest) * smallest).clamp(min=smallest)
    return cast(torch.where(scale < normal, tiny, scale), format, format.scale_dtype, "A scale")


def grid_from_range(low: Tensor, high: Tensor, format: NumberFormat) -> Grid:
    """Return the grid of groups with values from `low` to `high`, float32 [R, groups]."""
    levels, half = (1 << format.bits) - 1, 1 << (format.bits - 1)
    if format.symmetric:
        reach = torch.maximum(low.abs(), high.abs())
        return Grid(format, store(reach / (half - 1), format), None)
    if format.offset == "zero_point":
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = store((high - low) / levels, format)
        zero = torch.round(-low / scale.float()).clamp(0, levels)
        return Grid(format, scale, zero.to(torch.uint8))
    scale = store((high - low) / levels, format)
    offset = low if format.offset == "minimum" else low + half * scale.float()
    return Grid(format, scale, cast(offset, format, format.scale_dtype, "An offset"))


def fit(weight: Tensor, format: NumberFormat) -> Grid:
    """Return the grid of float32 weights [R, K], from the range of each group."""
    low, high = grouped(weight, format).aminmax(dim=-1)  # [R, groups]
    return grid_from_range(low, high, format)


def _parts(grid: Grid) -> tuple[Tensor, Tensor | float, Tensor | float]:
    """Return (scale, zero, start) of w = (code - zero) * scale + start."""
    scale = grid.scale.float()[..., None]
    if grid.offset is None:
        return scale, 0.0, 0.0
    offset = grid.offset.float()[..., None]
    if grid.format.offset == "zero_point":
        return scale, offset, 0.0
    return scale, 0.0 if grid.format.offset == "minimum" else 1 << (grid.format.bits - 1), offset


def encode(groups: Tensor, grid: Grid) -> Tensor:
    """Round float32 [..., G] to a grid with scales [...]; return clamped codes, int16."""
    scale, zero, start = _parts(grid)
    codes = (groups - start if isinstance(start, Tensor) else groups) / scale
    return codes.round_().add_(zero).clamp_(*grid.format.code_range).to(torch.int16)


def decode(codes: Tensor, grid: Grid) -> Tensor:
    """Return the values, float32 [..., G], of codes on a grid with scales [...]."""
    scale, zero, start = _parts(grid)
    return codes.to(torch.float32, copy=True).sub_(zero).mul_(scale).add_(start)


def round_to_grid(columns: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Round [R, C] to a grid with one scale per column.

    Returns codes int16 [R, C] and values float32 [R, C].
    """
    codes = encode(columns[..., None], grid)
    return codes[..., 0], decode(codes, grid)[..., 0]
