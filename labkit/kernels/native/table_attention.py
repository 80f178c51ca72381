"""Compute attention on CPUs for a few tokens per row, with keys and values in blocks.

    table_attention(queries [B, H, T, D], keys, values, Rows(starts, counts, tables))

Token s of row b is in slot s % size of block tables[b][s // size]. A contiguous cache
has one block per row. `keys` and `values` are {"numbers": [blocks, K, size, D]} in
float32 or bfloat16, or INT8 {"codes", "scale", "minimum"} with a bfloat16 scale and
minimum per token. The kernel reads the codes directly and applies a scale once per
score. PyTorch's operators would write a float per code to memory and read it again.
When it loses: with many tokens per row (a prefill), because one conversion then serves
all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from labkit.kernels.native.build import TABLES, NotNative, library
from labkit.kernels.native.structures import Attention

MOST_QUERIES = 16  # tokens per row


class Rows:
    """The positions and blocks of the tokens of each row; one object serves all layers.

    The new tokens of row b have the positions starts[b] to starts[b] + counts[b] - 1.
    `tables` [B, n] lists the blocks of each row. Without it, row b is block b.
    """

    def __init__(self, starts: Sequence[int], counts: Sequence[int], tables: Tensor | None = None):
        tables = torch.arange(len(starts))[:, None] if tables is None else tables
        self.tables = tables.to(torch.int32).contiguous()
        self.spans = torch.tensor([starts, counts], dtype=torch.int32)


def _kind(side: Mapping[str, Tensor], D: int) -> int | None:
    """Return 0 for float32, 1 for bfloat16, 2 for INT8, None for other formats."""
    if "numbers" in side:
        return {torch.float32: 0, torch.bfloat16: 1}.get(side["numbers"].dtype)
    if set(side) != {"codes", "scale", "minimum"} or side["codes"].shape[-1] != D:
        return None
    scales = (side["scale"], side["minimum"])
    return 2 if all(t.shape[-1] == 1 and t.dtype == torch.bfloat16 for t in scales) else None


def table_attention(
    queries: Tensor,
    keys: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    rows: Rows,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
) -> Tensor | None:
    """Return the attention [B, H, T, D], or None if the kernel does not support it.

    Each token sees itself and the earlier tokens that are within `window` or among the
    first `sinks`. The result of tokens from counts[b] on is zero. Sums are in float32.
    Returns None if there are no native kernels, for another device or format, and for
    more than MOST_QUERIES tokens per row.
    """
    B, H, T, D = queries.shape
    kind = _kind(keys, D) if queries.device.type == "cpu" and T <= MOST_QUERIES else None
    if kind is None or kind != _kind(values, D):
        return None
    try:
        attend = library(TABLES).attend
    except NotNative:
        return None
    q = (queries.float() * (D**-0.5 if scale is None else scale)).contiguous()
    out = torch.empty_like(q)
    names = ("codes", "scale", "minimum") if kind == 2 else ("numbers", "", "")
    tensors = [side.get(name) for side in (keys, values) for name in names]
    sides = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    (_, K, size, _), (starts, counts) = keys[names[0]].shape, rows.spans
    pointers = (rows.tables.data_ptr(), starts.data_ptr(), counts.data_ptr())
    shape = (B, K, H // K, T, D, size, rows.tables.shape[1])
    options = (window or 0, sinks, kind, torch.get_num_threads())
    call = Attention(q.data_ptr(), out.data_ptr(), *sides, *pointers, *shape, *options)
    attend(ctypes.addressof(call))
    return out.to(queries.dtype)
