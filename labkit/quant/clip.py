"""Clipping: a smaller range rounds the many weights finer and cuts the few largest off. Found by trying.

For each group the range low..high is shrunk to r * low .. r * high, r = 1, 0.95, …, 0.5, and the r is kept whose error
on the calibration text is least: d H_gg d^T, where d is the group's change and H_gg its part of the Hessian (errors of
other groups are taken as independent). Without calibration H = 1 and it is the squared change of the weights.
Source: the clipping search of AWQ (Lin et al., 2023) and of OmniQuant, here by Hessian instead of activations.

Cost: per r one rounding and N K G operations. Alone it comes close to AWQ; it composes with AWQ and GPTQ, which take
its grid. At 8 bits it gains nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.errors import BadRequest
from labkit.formats import integer
from labkit.formats.integer import Grid
from labkit.formats.names import NumberFormat

RATIOS = tuple(1.0 - 0.05 * i for i in range(11))


def search_clip(weight: Tensor, format: NumberFormat, hessian: Tensor | None = None, ratios=RATIOS) -> Grid:
    """weight float32 [N, K] -> the best grid, group by group."""
    if format.kind != "integer" or format.sharing == "tensor":
        raise BadRequest(
            f"Clipping searches the range of groups or channels, and {format.name} has none; use method 'rtn' for it."
        )
    weight = weight.detach().float()
    groups = integer.grouped(weight, format)  # [N, groups, G]
    blocks = None if hessian is None else diagonal_blocks(hessian, groups.shape[1], groups.shape[2])
    low, high = groups.aminmax(dim=-1)
    best, best_error = None, None
    for ratio in ratios:
        grid = integer.grid_from_range(low * ratio, high * ratio, format)
        change = integer.decode(integer.encode(groups, grid), grid) - groups
        change.flatten(1)[:, weight.shape[1] :] = 0  # past the end of a short last group
        error = weighted(change, blocks)  # [N, groups]
        if best is None:
            best, best_error = grid, error
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best.scale = torch.where(better, grid.scale, best.scale)
        if best.offset is not None:
            best.offset = torch.where(better, grid.offset, best.offset)
    return best


def diagonal_blocks(hessian: Tensor, groups: int, size: int) -> Tensor:
    """[K, K] -> [groups, G, G]; columns past the end of a short last group weigh nothing."""
    padded = torch.nn.functional.pad(hessian.float(), (0, groups * size - len(hessian)) * 2)
    return padded.view(groups, size, groups, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def weighted(change: Tensor, blocks: Tensor | None) -> Tensor:
    """d H_gg d^T of each group: [N, groups, G] -> [N, groups]."""
    if blocks is None:
        return change.square().sum(-1)
    moved = torch.bmm(change.transpose(0, 1), blocks).transpose(0, 1)  # [N, groups, G]
    return (moved * change).sum(-1)
