"""Describe one call of the native kernels: its tokens, its cache and its results."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.cache.contract import InMemory, KVCache
from labkit.kernels.native.structures import Step

# In the order of native_forward.cpp.
PHASES = ("embedding", "norms", "products", "rotary", "attention", "head")
KV_KINDS = {"fp32": 0, "bf16": 1, "int8": 2}


class Tokens(NamedTuple):
    """Ids, batch rows, positions and rows of the logits (-1: none) of N tokens."""

    ids: Sequence[int]
    rows: Sequence[int]
    positions: Sequence[int]
    logits_at: Sequence[int]


def addresses_of(cache: KVCache, memory: InMemory) -> Any:
    """Return the windows of all layers, and the addresses of their keys, values and scales.

    The result is stored in `memory`, because it takes 20 us to compute.
    """
    if memory.addresses is None:
        L = len(memory.keys)
        pointers, scales = ctypes.c_void_p * L, (ctypes.c_void_p * (4 * L))()
        windows = (ctypes.c_int32 * L)(*(layer.window or 0 for layer in cache.shape.layers))
        name = "codes" if memory.kind == "int8" else "numbers"
        keys, values = (
            pointers(*(tensors[name].data_ptr() for tensors in side))
            for side in (memory.keys, memory.values)
        )
        if memory.kind == "int8":
            sides = [side for pair in zip(memory.keys, memory.values) for side in pair]
            scales[:] = [side[name].data_ptr() for side in sides for name in ("scale", "minimum")]
        memory.addresses = windows, keys, values, scales
    return memory.addresses


def step_of(
    cache, tokens: Tokens, logits: Tensor, hidden: Tensor | None, spent: ctypes.Array | None
) -> tuple[Step, tuple]:
    """Return the structure of one call, and arrays that must exist until the call returns.

    The call writes to `logits` and, if they are not None, to `hidden` and `spent`.
    """
    N, memory = len(tokens.ids), cache.in_memory()
    ints = ctypes.c_int32 * N
    rest = (ints(*numbers) for numbers in tokens[1:])
    arrays = ((ctypes.c_int64 * N)(*tokens.ids), *rest, *addresses_of(cache, memory))
    hidden_at = None if hidden is None else hidden.data_ptr()
    spent_at = None if spent is None else ctypes.addressof(spent)
    rounded = int(cache.dtype == torch.bfloat16)
    numbers = (N, memory.slots, KV_KINDS[memory.kind], rounded, torch.get_num_threads())
    pointers = map(ctypes.addressof, arrays)
    return Step(*pointers, logits.data_ptr(), hidden_at, spent_at, *numbers), arrays
