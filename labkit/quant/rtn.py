"""Round to nearest (RTN): round each weight to the grid that spans its group's range.

    scale = (high - low) / (2^bits - 1)      zero = round(-low / scale)
    code  = clamp(round(w / scale) + zero, 0, 2^bits - 1)
    w'    = (code - zero) * scale

RTN needs no data and no search, and takes milliseconds. A weight changes by half a
scale or less. The error of a layer's *outputs* also depends on its inputs; GPTQ, AWQ
and clipping use these.

When it loses: at 8 bits RTN is enough, at 4 bits its loss is visible, and at 3 bits it
is large.

`rtn` is the method in its plain form. `labkit.formats.round_to_nearest` does the same for every
format and stores the codes. A test checks that both agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.formats.tensor import QuantizedTensor


def rtn(weight: Tensor, bits: int, group_size: int) -> Tensor:
    """Round `weight` [N, K] to int{bits}_g{group_size}_zp; return float32 [N, K].

    `group_size` must divide K. Scales are rounded to float16, as in the format. The
    format also rounds scales up if they are below float16's normal numbers.
    """
    groups = weight.float().view(len(weight), -1, group_size)  # [N, groups, G]
    low = groups.amin(-1, keepdim=True).clamp(max=0)  # the range contains 0, so 0 is exact
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    levels = 2**bits - 1
    scale = ((high - low) / levels).clamp(min=2.0**-24).half().float()  # never 0
    zero = torch.round(-low / scale).clamp(0, levels)
    codes = (torch.round(groups / scale) + zero).clamp(0, levels)
    return ((codes - zero) * scale).view(weight.shape)


def error(weight: Tensor, quantized: QuantizedTensor, hessian: Tensor | None = None) -> float:
    """Return the mean squared error of the layer's outputs on the calibration text.

    This is tr(D H D^T) / N for the change D [N, K] of the weights and the Hessian H
    [K, K]. Without H, return the mean squared error of the weights.
    """
    change = quantized.dequantize() - weight.detach().float()  # [N, K]
    if hessian is None:
        return float(change.square().mean())
    return float((change @ hessian.float() * change).sum() / len(change))


def expected_error(quantized: QuantizedTensor) -> float:
    """Predict the mean squared error of the weights as the mean of scale^2 / 12.

    The formula assumes that weights are uniformly distributed between grid points. It
    is wrong for a checkpoint that was rounded before, whose weights are on a grid. It
    is also wrong for groups in which most weights are far smaller than one step.
    """
    return float(quantized.grid.scale.float().square().mean() / 12)
