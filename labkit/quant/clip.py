"""Clip each group to a smaller range, so that most of its weights are rounded more finely.

For each group the range low..high is shrunk to r * low .. r * high for r = 1, 0.95,
..., 0.5. The search keeps the r with the least error d H_gg d^T on the calibration
text. Here d is the change of the group's weights, and H_gg is the group's part of the
Hessian; errors of other groups count as independent. Without calibration, H is the
identity, and the error is the squared change of the weights. Source: the clipping
search of AWQ (Lin et al., 2023) and of OmniQuant, which use activations instead of the
Hessian.

Cost: one rounding and N K G operations per r. Alone, clipping comes close to AWQ. AWQ
and GPTQ can also use its grid.

When it loses: clipping gains nothing at 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.errors import BadRequest
from labkit.formats import integer
from labkit.formats.integer import Grid
from labkit.formats.names import NumberFormat

RATIOS = tuple(1.0 - 0.05 * i for i in range(11))


def search_clip(
    weight: Tensor,
    format: NumberFormat,
    hessian: Tensor | None = None,
    ratios: Sequence[float] = RATIOS,
) -> Grid:
    """Return the best grid for `weight` [N, K]; each group gets its own ratio.

    Raises BadRequest for a format without groups or channels.
    """
    if format.kind != "integer" or format.sharing == "tensor":
        raise BadRequest(f"{format.name} has no groups or channels to clip; use method 'rtn'.")
    weight = weight.detach().float()
    groups = integer.grouped(weight, format)  # [N, groups, G]
    blocks = None if hessian is None else diagonal_blocks(hessian, *groups.shape[1:])
    low, high = groups.aminmax(dim=-1)
    best = integer.fit(weight, format)
    best_error = torch.full_like(low, float("inf"))
    for ratio in ratios:
        grid = integer.grid_from_range(low * ratio, high * ratio, format)
        change = integer.decode(integer.encode(groups, grid), grid) - groups
        change.flatten(1)[:, weight.shape[1] :] = 0  # past the end of a short last group
        error = weighted(change, blocks)  # [N, groups]
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best.scale = torch.where(better, grid.scale, best.scale)
        if best.offset is not None and grid.offset is not None:
            best.offset = torch.where(better, grid.offset, best.offset)
    return best


def diagonal_blocks(hessian: Tensor, groups: int, size: int) -> Tensor:
    """Return the diagonal blocks [groups, G, G] of [K, K].

    A short last group is padded with zeros.
    """
    padded = torch.nn.functional.pad(hessian.float(), (0, groups * size - len(hessian)) * 2)
    return padded.view(groups, size, groups, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def weighted(change: Tensor, blocks: Tensor | None) -> Tensor:
    """Return d H_gg d^T [N, groups] of each group of `change` [N, groups, G]."""
    if blocks is None:
        return change.square().sum(-1)
    moved = torch.bmm(change.transpose(0, 1), blocks).transpose(0, 1)  # [N, groups, G]
    return (moved * change).sum(-1)
