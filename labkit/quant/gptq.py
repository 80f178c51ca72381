"""GPTQ: round column by column, and correct the error in the columns not yet rounded.

For a layer y = W x with H = mean of x x^T, rounding column k by d costs d^2 / [H^-1]_kk
if the later columns move by -d * [H^-1]_k,later / [H^-1]_kk. With U the upper Cholesky
factor of H^-1, row k of U contains that whole update:

    for k = 0 .. K-1:   e = (w_k - round(w_k)) / U_kk;   W[:, k+1:] -= e U[k, k+1:]

Source: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ", 2022. Two refinements are on by
default: columns are visited in descending order of the diagonal of H (act-order), and
every group's scales are fixed beforehand (static groups), so stored columns keep their
order and no kernel needs an index. Without act-order GPTQ can be *worse* than rounding
to nearest if one input dominates H, and the first token of a text has that effect.

Cost: K^3 for the factor and N K^2 for the updates, once. GPTQ loses to rounding if the
calibration text differs from the texts in use. If no calibration token reached the
layer (an expert that was never chosen), H is 0; the layer is then rounded to nearest,
with a warning.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.errors import BadRequest, Number, check_fields
from labkit.formats import integer
from labkit.formats.integer import Grid
from labkit.formats.names import NumberFormat
from labkit.formats.tensor import QuantizedTensor, check, from_codes, from_grid

BLOCK = 128  # columns updated one by one before the rest of the matrix is


@dataclass(frozen=True, kw_only=True)
class GPTQOptions:
    """`damping` is added to the diagonal of H, as a share of its mean.

    Measured on the default model and one text at 3 bits: 0.01 lost a tenth more, and
    0.1 gained nothing.
    """

    damping: float = 0.05
    act_order: bool = True
    static_groups: bool = True

    def __post_init__(self):
        check_fields(self, damping=Number(0, 1))


def gptq(
    weight: Tensor,
    format: NumberFormat,
    hessian: Tensor,
    options: GPTQOptions = GPTQOptions(),
    grid: Grid | None = None,
    name: str = "this layer",
) -> QuantizedTensor:
    """Quantize `weight` [N, K] for inputs with the given `hessian` [K, K].

    `grid` holds scales that were chosen before (by clipping); otherwise each group's
    minimum and maximum give them. Raises BadRequest for a format without an integer
    grid, for act-order without static groups, and for a Hessian of another size.
    """
    check(weight, format)
    if format.kind != "integer":
        raise BadRequest(f"GPTQ needs an integer format; for {format.name} use method 'rtn'.")
    if options.act_order and not options.static_groups and format.group_size:
        raise BadRequest(
            "act_order scatters the columns of a group, so it needs static groups; "
            "set static_groups=True."
        )
    inputs = weight.shape[-1]
    if hessian.shape != (inputs, inputs):
        raise BadRequest(
            f"{name} reads {inputs} inputs but its Hessian is {[*hessian.shape]}; collect it again."
        )
    original = weight.detach().float()
    grid = grid or integer.fit(original, format)
    upper, order = inverse_factor(hessian, options)
    if upper is None:
        reached = bool(hessian.diagonal().any())
        reason = (
            "its Hessian cannot be factorized" if reached else "no calibration token reached it"
        )
        warnings.warn(f"GPTQ: {name} is rounded to nearest, because {reason}.", stacklevel=2)
        return from_grid(original, grid, tuple(weight.shape))

    # The loop runs over columns: store them as rows [K, N] in that order.
    work = original.T[order].contiguous()
    columns = grid.columns(0, inputs)
    scale = columns.scale.T[order].contiguous()
    offset = None if columns.offset is None else columns.offset.T[order].contiguous()
    codes = torch.empty(work.shape, dtype=torch.int16, device=work.device)
    size = 0 if options.static_groups else format.group_size
    for start in range(0, len(work), BLOCK):
        stop = min(start + BLOCK, len(work))
        errors = torch.empty_like(work[start:stop])
        for k in range(start, stop):
            if size and k % size == 0:  # fit this group's grid to its weights as they are now
                fresh = integer.fit(work[k : k + size].T, format)
                grid.scale[:, k // size] = scale[k : k + size] = fresh.scale[:, 0]
                if offset is not None:
                    grid.offset[:, k // size] = offset[k : k + size] = fresh.offset[:, 0]  # type: ignore[index]
            column = Grid(format, scale[k], None if offset is None else offset[k])
            codes[k], value = integer.round_to_grid(work[k], column)
            errors[k - start] = (work[k] - value) / upper[k, k]  # [N]
            work[k:stop].addr_(upper[k, k:stop], errors[k - start], alpha=-1)
        work[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    restored = torch.empty_like(codes)
    restored[order] = codes
    return from_codes(restored.T.contiguous(), grid, tuple(weight.shape))


def inverse_factor(hessian: Tensor, options: GPTQOptions) -> tuple[Tensor | None, Tensor]:
    """Return (U, order) with U^T U = (H + damping)^-1, in the order of rounding.

    Inputs that are always 0 get the mean diagonal; their weights are rounded to
    nearest. The damping grows tenfold until the factor exists; U is None if it does not
    exist at 100 %.
    """
    H = hessian.float().clone()
    diagonal = H.diagonal()
    dead = diagonal == 0
    if dead.all():
        return None, dead
    diagonal[dead] = diagonal[~dead].mean()
    order = torch.arange(len(H), device=H.device)
    if options.act_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
    H = H[order][:, order]
    mean, share = H.diagonal().mean(), options.damping
    while share <= 1.0:
        damped = H.clone()
        damped.diagonal().add_(share * mean)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not failed and bool(torch.isfinite(upper).all()):
                return upper, order
        share = max(share, 1e-4) * 10
    return None, order
