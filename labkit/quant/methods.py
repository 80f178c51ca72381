"""Select methods by name: `rtn`, `clip`, `gptq`, `awq`, or several joined by +.

The methods act at different steps, so they can be combined. First AWQ rescales columns
of the model. Then clipping chooses the range of each group, and GPTQ chooses the codes
on that grid.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from labkit.errors import BadRequest, Number, check_fields
from labkit.formats import get_format, integer
from labkit.formats.names import NumberFormat
from labkit.formats.tensor import QuantizedTensor, check, from_grid, round_to_nearest
from labkit.quant.calibrate import InputStatistics
from labkit.quant.clip import search_clip
from labkit.quant.gptq import gptq

PARTS = ("rtn", "awq", "clip", "gptq")
FEW_RATIOS = (1.0, 0.9, 0.8, 0.7)  # of clipping, in AWQ's search


@dataclass(frozen=True)
class Method:
    """A method, or several joined by +, with the options of `gptq`."""

    name: str = "rtn"
    damping: float = 0.05
    act_order: bool = True

    def __post_init__(self):
        check_fields(self, damping=Number(0, 1))
        if unknown := [part for part in self.parts if part not in PARTS]:
            names = f"{', '.join(PARTS)}, or several, as in awq+gptq+clip"
            raise BadRequest(f"There is no method {unknown[0]!r}; give {names}.")
        repeated = len(set(self.parts)) < len(self.parts)
        if repeated or ("rtn" in self.parts and len(self.parts) > 1):
            text = f"Method {self.name!r} repeats a part, or combines rtn with another one"
            raise BadRequest(f"{text}; give each part once, and rtn alone.")

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(str(self.name).split("+"))

    @property
    def calibrated(self) -> bool:
        """Whether the method uses calibration text if there is any."""
        return self.parts != ("rtn",)

    @property
    def needs_text(self) -> bool:
        """Whether the method needs calibration text. Clipping does not."""
        return not {"awq", "gptq"}.isdisjoint(self.parts)


def quantize(
    weight: Tensor,
    format: str | NumberFormat,
    calibration: InputStatistics | None = None,
    method: str | Method | None = None,
    name: str = "this layer",
) -> QuantizedTensor:
    """Quantize a weight [N, K] by `method`.

    The default method is GPTQ with `calibration`, and rounding to nearest without it.
    Float formats are always rounded to nearest. AWQ has no effect here, because it
    changes the model beforehand (see `quantize_model`). Raises BadRequest if GPTQ has no
    calibration.
    """
    format, default = get_format(format), "rtn" if calibration is None else "gptq"
    method = method if isinstance(method, Method) else Method(method or default)
    check(weight, format)
    grid = None
    if "clip" in method.parts and format.kind == "integer" and format.sharing != "tensor":
        hessian = calibration.hessian if calibration is not None and calibration.tokens else None
        grid = search_clip(weight, format, hessian)
    if "gptq" in method.parts and format.kind == "integer":
        if calibration is None:
            raise BadRequest("GPTQ needs calibration text; give some, or use method 'rtn'.")
        options = (method.damping, method.act_order)
        return gptq(weight, format, calibration.hessian, grid, *options, name)
    if grid is None:
        return round_to_nearest(weight, format)
    return from_grid(weight.detach().float(), grid, tuple(weight.shape))


def round_trip(
    weight: Tensor, format: NumberFormat, method: Method, statistics: InputStatistics
) -> Tensor:
    """Return float32 weights after rounding to an integer format, without GPTQ.

    AWQ's search calls this many times.
    """
    if "clip" in method.parts and format.sharing != "tensor":
        grid = search_clip(weight, format, statistics.hessian, FEW_RATIOS)
    else:
        grid = integer.fit(weight, format)
    return from_grid(weight, grid, tuple(weight.shape)).dequantize()
