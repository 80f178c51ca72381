"""Round to nearest: each group's range becomes the grid, each weight its nearest point. The baseline of every method.

    quantize(weight, "int4_g64_zp")    ->  codes, scales, zero points, packed

No data, no search, milliseconds. The error of one weight is at most half a scale; what it does to the *outputs* depends on
what the layer reads, which is all that GPTQ, AWQ and clipping add. At 8 bits it is enough; at 4 it loses visibly,
at 3 badly. The arithmetic is in labkit.formats.integer; `error` below is what the methods are compared by.
"""

from __future__ import annotations

from torch import Tensor

from labkit.formats import quantize
from labkit.formats.tensor import QuantizedTensor

__all__ = ["error", "expected_error", "quantize"]


def error(weight: Tensor, held: QuantizedTensor, hessian: Tensor | None = None) -> float:
    """Mean squared error of the layer's outputs on the calibration text, tr(D H D^T) / N; of the weights without H."""
    change = held.dequantize() - weight.detach().float()  # [N, K]
    if hessian is None:
        return float(change.square().mean())
    return float((change @ hessian.float() * change).sum() / len(change))


def expected_error(held: QuantizedTensor) -> float:
    """Mean squared error of the weights if they lay anywhere between two values: scale^2 / 12, mean over the groups.

    A prediction from the scales alone. It is wrong where weights lie on the grid already (a checkpoint that was rounded
    before), or where most of a group is far smaller than one step."""
    return float(held.scale.float().square().mean() / 12)
