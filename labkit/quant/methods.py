"""The methods by name, and how they combine: `rtn`, `clip`, `gptq`, `awq`, and sums such as `awq+gptq+clip`.

They work at different places, so they add up: AWQ rescales columns (in the model, before), clipping chooses each group's
range, GPTQ chooses the codes on that grid. Each ends in the same QuantizedTensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from labkit.errors import BadRequest
from labkit.formats import integer
from labkit.formats.names import NumberFormat
from labkit.formats.tensor import QuantizedTensor, check, from_grid
from labkit.formats.tensor import quantize as round_to_nearest
from labkit.quant.calibrate import InputStatistics
from labkit.quant.clip import search_clip
from labkit.quant.gptq import gptq

PARTS = ("rtn", "awq", "clip", "gptq")


@dataclass(frozen=True)
class Method:
    """Which parts are on, and GPTQ's knobs."""

    name: str = "rtn"
    damping: float = 0.05  # at 3 bits 0.01 lost a tenth more, 0.1 nothing less (default model, one text)
    act_order: bool = True
    static_groups: bool = True

    def __post_init__(self):
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown:
            raise BadRequest(
                f"There is no method {unknown[0]!r}; choose from {', '.join(PARTS)}, or a sum such as awq+gptq+clip."
            )
        if len(set(self.parts)) < len(self.parts) or "rtn" in self.parts and len(self.parts) > 1:
            raise BadRequest(
                f"Method {self.name!r} names a part twice, or rounding beside what rounds otherwise; write each part once, as in awq+gptq+clip."
            )
        if not 0 <= self.damping <= 1:
            raise BadRequest(
                f"A damping of {self.damping} was given; it is a share of the Hessian's mean diagonal, 0 to 1 (0.01 to 0.1 is usual)."
            )

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(str(self.name).split("+"))

    @property
    def calibrated(self) -> bool:
        return bool({"awq", "gptq"} & set(self.parts)) or "clip" in self.parts


def quantize_weight(
    weight: Tensor,
    format: NumberFormat,
    method: str | Method,
    statistics: InputStatistics | None = None,
    name: str = "this layer",
    **options,
) -> QuantizedTensor:
    """One weight [N, K] by `method` (AWQ's part lies outside: in the model). Floats are rounded to nearest always."""
    method = method if isinstance(method, Method) else Method(method, **options)
    if format.kind != "integer":
        return round_to_nearest(weight, format)
    check(weight, format)
    grid = None
    if "clip" in method.parts and format.sharing != "tensor":
        seen = statistics is not None and statistics.tokens > 0
        grid = search_clip(weight, format, statistics.hessian if seen else None)
    if "gptq" in method.parts:
        if statistics is None:
            raise BadRequest(
                "GPTQ needs calibration: what the layer reads. Pass calibration text, or use method 'rtn'."
            )
        return gptq(
            weight, format, statistics.hessian, grid=grid, name=name,
            damping=method.damping, act_order=method.act_order, static_groups=method.static_groups,
        )  # fmt: skip
    if grid is None:
        return round_to_nearest(weight, format)
    return from_grid(weight.detach().float(), grid, tuple(weight.shape))


def round_trip(weight: Tensor, format: NumberFormat, method: Method, statistics: InputStatistics | None) -> Tensor:
    """The weight as it would be held, float32, without packing: AWQ's search asks this many times. GPTQ is left out."""
    if format.kind != "integer":
        return round_to_nearest(weight, format).dequantize()
    clip = "clip" in method.parts and format.sharing != "tensor" and statistics is not None
    grid = (
        search_clip(weight, format, statistics.hessian, (1.0, 0.9, 0.8, 0.7)) if clip else integer.fit(weight, format)
    )
    values = integer.decode(integer.encode(integer.grouped(weight, format), grid), grid)
    return values.reshape(weight.shape[0], -1)[:, : weight.shape[1]]
