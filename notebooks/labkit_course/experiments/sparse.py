"""Set weights to zero: half of a matrix by size, or two of every four (2:4).

    magnitude    the smallest half of a matrix's weights become 0
    2:4          of every four neighbours along the input the two smallest become 0 (Mishra et al. 2021)

A stored zero takes as many bytes and as much time as any number. Only a format that leaves zeros
out *and* a kernel that reads it are faster. 2:4 has both on some GPUs (two numbers and two 2-bit
places for four weights: 9/16 of bfloat16's bytes). Scattered zeros need an index each, and pay
only if nearly all weights are zero. Without training the loss is larger than that of four bits,
which are fewer bytes than half of bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest

KINDS = ("magnitude", "2:4")


def mask(weight: Tensor, kind: str) -> Tensor:
    """Return a mask [N, K] that is True for the half of the weights that stay."""
    if kind == "magnitude":
        place = weight.abs().flatten().kthvalue(weight.numel() // 2).values
        return weight.abs() > place
    if kind == "2:4":
        if weight.shape[-1] % 4:
            raise BadRequest(
                f"2:4 needs inputs in fours, and {weight.shape[-1]} is not a multiple of 4; choose another matrix."
            )
        fours = weight.abs().unflatten(-1, (-1, 4))
        kept = torch.zeros_like(fours, dtype=torch.bool).scatter_(
            -1, fours.topk(2, -1).indices, True
        )
        return kept.flatten(-2)
    raise BadRequest(f"There is no sparsity {kind!r}; choose from {', '.join(KINDS)}.")


def packed_bits(kind: str, bits: int = 16) -> float:
    """Return bits per weight of a format without zeros: kept numbers and their places."""
    if kind not in KINDS:
        raise BadRequest(f"There is no sparsity {kind!r}; choose from {', '.join(KINDS)}.")
    place = 2 if kind == "2:4" else 16  # within four; or a column number
    return 0.5 * (bits + place)


@contextmanager
def pruned_weights(model: nn.Module, kind: str) -> Iterator[int]:
    """Zero half of the linear layers' weights (except the head) inside the block; yield the count."""
    linears = [
        part
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and not name.endswith("head")
    ]
    held, zeros = [part.weight.data for part in linears], 0
    try:
        for part in linears:
            kept = mask(part.weight.data, kind)
            part.weight.data = part.weight.data * kept
            zeros += int((~kept).sum())
        yield zeros
    finally:
        for part, weight in zip(linears, held):
            part.weight.data = weight
