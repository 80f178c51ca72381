"""GPTQ: round one column after another, and correct the error in the columns that follow.

For a layer y = W x with H = mean of x x^T, rounding changes column k by d. This costs
d^2 / [H^-1]_kk if the later columns change by -d * [H^-1]_k,later / [H^-1]_kk. Let U be
the upper Cholesky factor of H^-1. Then row k of U gives the whole update:

    for k = 0 .. K-1:   e = (w_k - round(w_k)) / U_kk;   W[:, k+1:] -= e U[k, k+1:]

Source: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ", 2022. By default, columns are
visited in descending order of the diagonal of H (act-order). Without act-order GPTQ can
be *worse* than rounding to nearest if one input dominates H, as in the first token of a
text. The scales of all groups are fixed before the first column (static groups). So
codes are stored in the order of the columns, and a kernel needs no index.

Cost: K^3 operations for the factor and N K^2 for the updates, once.

When it loses: GPTQ is worse than rounding to nearest if the calibration text differs
from the texts in use. If no calibration token reached the layer (an expert that was
never chosen), H is 0. The layer is then rounded to nearest, with a warning.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from labkit.errors import BadRequest
from labkit.formats import integer
from labkit.formats.integer import Grid
from labkit.formats.names import NumberFormat
from labkit.formats.tensor import QuantizedTensor, check, from_codes, from_grid

BLOCK = 128  # columns that are updated one by one before the rest of the matrix is


def gptq(
    weight: Tensor,
    format: NumberFormat,
    hessian: Tensor,
    grid: Grid | None = None,
    damping: float = 0.05,
    act_order: bool = True,
    name: str = "this layer",
) -> QuantizedTensor:
    """Quantize `weight` [N, K] for inputs with the given `hessian` [K, K].

    Args:
        grid: scales chosen before, for example by clipping. By default each group's
            minimum and maximum determine them.
        damping: the share of the mean of H's diagonal that is added to the diagonal. On
            the default model and one text at 3 bits, 0.01 lost a tenth more, and 0.1
            gained nothing.
        act_order: whether columns are visited in descending order of H's diagonal.
        name: the layer's name in errors and warnings.

    Raises BadRequest for a format without an integer grid, and for a Hessian of another
    size.
    """
    check(weight, format)
    if format.kind != "integer":
        raise BadRequest(f"GPTQ needs an integer format; for {format.name} use method 'rtn'.")
    inputs = weight.shape[-1]
    if hessian.shape != (inputs, inputs):
        size = f"{inputs} inputs but a Hessian of shape {[*hessian.shape]}"
        raise BadRequest(f"{name} has {size}; calibrate on this model.")
    original = weight.detach().float()
    grid = grid or integer.fit(original, format)
    upper, order = inverse_factor(hessian, damping, act_order)
    if upper is None:
        reached = bool(hessian.diagonal().any())
        reason = "its Hessian has no factor" if reached else "no calibration token reached it"
        warnings.warn(f"GPTQ: {name} is rounded to nearest, because {reason}.", stacklevel=2)
        return from_grid(original, grid, tuple(weight.shape))

    # The loop runs over columns: store them as rows [K, N] in the order of rounding.
    work = original.T[order].contiguous()
    columns = grid.columns(0, inputs)
    scale = columns.scale.T[order].contiguous()
    offset = None if columns.offset is None else columns.offset.T[order].contiguous()
    codes = torch.empty(work.shape, dtype=torch.int16, device=work.device)
    for start in range(0, len(work), BLOCK):
        stop = min(start + BLOCK, len(work))
        errors = torch.empty_like(work[start:stop])
        for k in range(start, stop):
            column = Grid(format, scale[k], None if offset is None else offset[k])
            codes[k], value = integer.round_to_grid(work[k], column)
            errors[k - start] = (work[k] - value) / upper[k, k]  # [N]
            work[k:stop].addr_(upper[k, k:stop], errors[k - start], alpha=-1)
        work[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    restored = torch.empty_like(codes)
    restored[order] = codes
    return from_codes(restored.T.contiguous(), grid, tuple(weight.shape))


def inverse_factor(
    hessian: Tensor, damping: float, act_order: bool
) -> tuple[Tensor | None, Tensor]:
    """Return (U, order) with U^T U = (H + damping)^-1, in the order of rounding.

    Inputs that are always 0 get the mean diagonal, so their weights are rounded to
    nearest. The damping grows tenfold until a factor exists. U is None if none exists
    at 100 %.
    """
    H = hessian.float().clone()
    diagonal = H.diagonal()
    dead = diagonal == 0
    if dead.all():
        return None, dead
    diagonal[dead] = diagonal[~dead].mean()
    order = torch.arange(len(H), device=H.device)
    if act_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
    H = H[order][:, order]
    mean = H.diagonal().mean()
    while damping <= 1.0:
        damped = H.clone()
        damped.diagonal().add_(damping * mean)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not failed and bool(torch.isfinite(upper).all()):
                return upper, order
        damping = max(damping, 1e-4) * 10
    return None, order
