"""GPTQ: round one input column at a time, and let the columns not yet rounded make up for the error.

For a layer y = W x with H = mean of x x^T, rounding column k by d costs d^2 / [H^-1]_kk when the later columns move by
-d * [H^-1]_k,later / [H^-1]_kk. With U the upper Cholesky factor of H^-1, row k of U is that whole update:

    for k = 0 .. K-1:   e = (w_k - round(w_k)) / U_kk;   W[:, k+1:] -= e U[k, k+1:]

Source: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ", 2022. Here: columns by falling diagonal of H (act-order) with every
group's scales fixed beforehand (static groups), so that stored columns keep their order and no kernel needs an index.
Without act-order it can be *worse* than rounding to nearest where one input dominates H, as the first token makes it.

Cost: K^3 for the factor and N K^2 for the updates, once. Loses to rounding when calibration does not look like use;
with no calibration tokens at all (an expert that was never chosen) H is 0 and the layer is rounded, which is said.
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

BLOCK = 128  # columns updated one by one before the rest of the matrix is


def gptq(
    weight: Tensor,
    format: NumberFormat,
    hessian: Tensor,
    *,
    grid: Grid | None = None,
    damping: float = 0.05,
    act_order: bool = True,
    static_groups: bool = True,
    name: str = "this layer",
) -> QuantizedTensor:
    """weight [N, K], hessian [K, K] -> QuantizedTensor. `grid`: scales chosen before (clipping); else min and max."""
    check(weight, format)
    if format.kind != "integer":
        raise BadRequest(f"GPTQ rounds to integer grids and {format.name} is none; use method 'rtn' for it.")
    if act_order and not static_groups and format.group_size:
        raise BadRequest(
            "Act-order without static groups scatters a group's columns and needs an index at every step; set static_groups=True."
        )
    if hessian.shape != (weight.shape[-1],) * 2:
        raise BadRequest(
            f"{name} reads {weight.shape[-1]} inputs but its Hessian is {tuple(hessian.shape)}; calibrate this very layer."
        )
    original = weight.detach().float()
    grid = grid or integer.fit(original, format)

    dead = hessian.diagonal() == 0  # inputs never seen: their weights touch nothing, and are simply rounded
    upper = None if bool(dead.all()) else inverse_factor(hessian, dead, damping, act_order)
    if upper is None:
        reason = "no calibration token reached it" if bool(dead.all()) else "its Hessian cannot be factorised"
        warnings.warn(f"GPTQ: {name} is rounded to nearest, because {reason}.", stacklevel=2)
        return from_grid(original, grid, tuple(weight.shape))
    upper, order = upper

    # Columns are what is walked, so they are held as rows: [K, N], in the order of work.
    work = original.T[order].contiguous()
    columns = grid.columns(0, weight.shape[-1])
    scale = columns.scale.T[order].contiguous()
    offset = None if columns.offset is None else columns.offset.T[order].contiguous()
    codes = torch.empty(work.shape, dtype=torch.int16, device=work.device)
    for start in range(0, len(work), BLOCK):
        stop = min(start + BLOCK, len(work))
        block, errors = work[start:stop], torch.empty_like(work[start:stop])
        for i in range(stop - start):
            k = start + i
            if not static_groups and format.group_size and k % format.group_size == 0:  # the grid of what is left
                left = integer.fit(work[k : k + format.group_size].T, format)
                group = k // format.group_size
                grid.scale[:, group] = scale[k : k + format.group_size] = left.scale[:, 0]
                if offset is not None:
                    grid.offset[:, group] = offset[k : k + format.group_size] = left.offset[:, 0]
            one = Grid(format, scale[k], None if offset is None else offset[k])
            codes[k], value = integer.round_to_grid(block[i], one)
            errors[i] = (block[i] - value) / upper[k, k]  # [N]
            block[i:].addr_(upper[k, k:stop], errors[i], alpha=-1)
        work[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    restored = torch.empty_like(codes)
    restored[order] = codes
    restored = restored.T.contiguous()
    return from_codes(restored, grid, tuple(weight.shape))


def inverse_factor(hessian: Tensor, dead: Tensor, damping: float, act_order: bool) -> tuple[Tensor, Tensor] | None:
    """(U with U^T U = (H + damping)^-1 in the order of work, that order), or None where no damping up to 100 % helps."""
    H = hessian.float().clone()
    diagonal = H.diagonal()
    diagonal[dead] = diagonal[~dead].mean()
    order = (
        torch.argsort(diagonal, descending=True, stable=True) if act_order else torch.arange(len(H), device=H.device)
    )
    H = H[order][:, order]
    mean = H.diagonal().mean()
    share = damping
    while share <= 1.0:
        damped = H.clone()
        damped.diagonal().add_(share * mean)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not failed and bool(torch.isfinite(upper).all()):
                return upper, order
        share = max(share, 1e-4) * 10
    return None
