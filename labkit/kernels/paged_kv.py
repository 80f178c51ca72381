"""Attention of a few new tokens a row over keys and values in blocks, found through tables: a kernel for the CPU.

    paged_attention(queries [B, H, T, D], keys, values, tables [B, n], starts, counts) -> [B, H, T, D], or None

`keys` and `values`: {"numbers": [blocks, K, size, D]} in float32 or bfloat16, or INT8 {"codes", "scale", "minimum"} with a
bfloat16 scale and minimum a token. None where the kernel does not serve (no compiler, another device or format, more than
MOST_QUERIES tokens, LABKIT_NATIVE=off); the caller then gathers, which is also the oracle. Sums are in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from labkit.kernels.one_file import functions_of

SOURCE = Path(__file__).with_name("paged_kv.cpp")
MOST_QUERIES = 16  # tokens a row; beyond that a gather costs little beside the products


class Call(ctypes.Structure):
    """What `paged_attend` is given; the same fields in the same order as in the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "out", "keys", "key_scale", "key_minimum", "values", "value_scale",
                                               "value_minimum", "tables", "starts", "counts")),
        *((name, ctypes.c_int64) for name in ("B", "K", "G", "T", "D", "size", "width", "window", "sinks", "kind",
                                              "threads")),
    ]  # fmt: skip


@lru_cache(maxsize=8)
def _entry(functions: ctypes.CDLL):
    functions.paged_attend.argtypes, functions.paged_attend.restype = [ctypes.c_void_p], None
    return functions.paged_attend


def _kind(held: dict[str, Tensor], D: int) -> int | None:
    """How the kernel reads this: 0 float32, 1 bfloat16, 2 INT8; None: not at all."""
    if "numbers" in held:
        return {torch.float32: 0, torch.bfloat16: 1}.get(held["numbers"].dtype)
    if set(held) != {"codes", "scale", "minimum"} or held["codes"].shape[-1] != D:
        return None
    scale = held["scale"]
    return 2 if scale.shape[-1] == 1 and scale.dtype == held["minimum"].dtype == torch.bfloat16 else None


def _addresses(held: dict[str, Tensor], kind: int) -> tuple[int | None, ...]:
    if kind < 2:
        return held["numbers"].data_ptr(), None, None
    return held["codes"].data_ptr(), held["scale"].data_ptr(), held["minimum"].data_ptr()


def paged_attention(queries: Tensor, keys: dict[str, Tensor], values: dict[str, Tensor], tables: Tensor,
                    starts: Sequence[int], counts: Sequence[int], *, scale: float | None = None, window: int | None = None,
                    sinks: int = 0, memo: dict | None = None) -> Tensor | None:  # fmt: skip
    """Row b's token t stands at position starts[b] + t and sees what lies before it; tokens from counts[b] on get zeros.
    `memo`: kept by the caller for one pass, so that tables and lengths are laid out once and not once a layer."""
    B, H, T, D = queries.shape
    kind = _kind(keys, D) if queries.device.type == "cpu" and T <= MOST_QUERIES else None
    if kind is None or kind != _kind(values, D):
        return None
    functions = functions_of(SOURCE)
    if functions is None:
        return None
    memo = {} if memo is None else memo
    if "kernel" not in memo:
        rows = torch.tensor([starts, counts], dtype=torch.int32)
        memo["kernel"] = rows, tables.to(torch.int32).contiguous()
    rows, tables = memo["kernel"]
    _, K, size, _ = next(iter(keys.values())).shape
    q = (queries.float() * (D**-0.5 if scale is None else scale)).contiguous()
    out = torch.empty_like(q)
    call = Call(q.data_ptr(), out.data_ptr(), *_addresses(keys, kind), *_addresses(values, kind), tables.data_ptr(),
                rows.data_ptr(), rows[1].data_ptr(), B, K, H // K, T, D, size, tables.shape[1], window or 0, sinks, kind,
                torch.get_num_threads())  # fmt: skip
    _entry(functions)(ctypes.addressof(call))
    return out.to(queries.dtype)
