"""Select methods by name: `rtn`, `clip`, `gptq`, `awq`, or several joined by +.

The methods act at different steps, so they can be combined: AWQ first rescales columns
of the model, clipping chooses the range of each group, and GPTQ chooses the codes on
that grid. Each method returns a QuantizedTensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from labkit.errors import BadRequest
from labkit.formats import get_format, integer
from labkit.formats.names import NumberFormat
from labkit.formats.tensor import QuantizedTensor, check, from_grid
from labkit.formats.tensor import quantize as round_to_nearest
from labkit.quant.calibrate import InputStatistics
from labkit.quant.clip import search_clip
from labkit.quant.gptq import GPTQOptions, gptq

PARTS = ("rtn", "awq", "clip", "gptq")
FEW_RATIOS = (1.0, 0.9, 0.8, 0.7)  # AWQ's search clips this coarsely


@dataclass(frozen=True)
class Method(GPTQOptions):
    """A method, or several joined by +, with the options of GPTQ."""

    name: str = "rtn"

    def __post_init__(self):
        super().__post_init__()
        if unknown := [part for part in self.parts if part not in PARTS]:
            names = f"{', '.join(PARTS)}, or several, as in awq+gptq+clip"
            raise BadRequest(f"There is no method {unknown[0]!r}; choose from {names}.")
        repeated = len(set(self.parts)) < len(self.parts)
        if repeated or ("rtn" in self.parts and len(self.parts) > 1):
            raise BadRequest(
                f"Method {self.name!r} has a part twice, or rtn and another part; "
                "name each part once, and rtn alone."
            )

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(str(self.name).split("+"))

    @property
    def calibrated(self) -> bool:
        """True if the method reads calibration text when there is one."""
        return self.parts != ("rtn",)

    @property
    def needs_text(self) -> bool:
        """True if the method cannot work without calibration text; clipping can."""
        return not {"awq", "gptq"}.isdisjoint(self.parts)


def quantize(
    weight: Tensor,
    format: str | NumberFormat,
    calibration: InputStatistics | None = None,
    method: str | Method | None = None,
    name: str = "this layer",
) -> QuantizedTensor:
    """Quantize one weight [N, K] by `method`.

    The default is rounding to nearest without `calibration`, GPTQ with it. Float
    formats are always rounded to nearest. AWQ changes the model beforehand: see
    `quantize_model`. Raises BadRequest if GPTQ has no calibration.
    """
    format, default = get_format(format), "rtn" if calibration is None else "gptq"
    method = method if isinstance(method, Method) else Method(name=method or default)
    check(weight, format)
    grid = None
    if "clip" in method.parts and format.kind == "integer" and format.sharing != "tensor":
        hessian = calibration.hessian if calibration is not None and calibration.tokens else None
        grid = search_clip(weight, format, hessian)
    if "gptq" in method.parts and format.kind == "integer":
        if calibration is None:
            raise BadRequest("GPTQ needs calibration text; pass some, or use method 'rtn'.")
        return gptq(weight, format, calibration.hessian, method, grid, name)
    if grid is None:
        return round_to_nearest(weight, format)
    return from_grid(weight.detach().float(), grid, tuple(weight.shape))


def round_trip(
    weight: Tensor, format: NumberFormat, method: Method, statistics: InputStatistics | None
) -> Tensor:
    """Return the weight as an integer format would store it, in float32, without GPTQ.

    AWQ's search calls this many times.
    """
    if "clip" in method.parts and format.sharing != "tensor" and statistics is not None:
        grid = search_clip(weight, format, statistics.hessian, FEW_RATIOS)
    else:
        grid = integer.fit(weight, format)
    values = integer.decode(integer.encode(integer.grouped(weight, format), grid), grid)
    return integer.ungrouped(values, *weight.shape)
