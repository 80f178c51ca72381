"""One call of the native stack: what it is told of its tokens, of the cache, and of where results go."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from labkit.cache.contiguous import ContiguousCache
from labkit.cache.quantized import QuantizedCache
from labkit.kernels.native_pack import Step

PHASES = ("embedding", "norms", "products", "rotary", "attention", "head")  # as native_forward.cpp numbers them


def kv_kind(cache) -> int | None:
    """How the one call reads a cache: 0 float32, 1 bfloat16, 2 INT8 a token; None where it does not."""
    plain = {torch.float32: 0, torch.bfloat16: 1}.get(cache.dtype)
    if cache.device.type != "cpu" or any(layer.sinks or layer.shared_with is not None for layer in cache.shape.layers):
        return None
    if type(cache) is ContiguousCache:
        return plain
    if type(cache) is QuantizedCache and cache.format.name == "int8_token":
        return None if plain is None else 2
    return None


def finished(cache) -> None:
    """Tell a cache that keeps account of it that every layer's keys and values have come."""
    if isinstance(cache, QuantizedCache):
        cache.missing.clear()


def addresses_of(cache) -> tuple:
    """Windows, keys, values and scales of every layer; a contiguous cache remembers them, since asking takes 20 us."""
    held, known = getattr(cache, "addresses", None) or (None, None)
    if known is not None and held is cache.keys:  # another list of tensors: a view of some layers of this cache
        return known
    L = cache.shape.num_layers
    kind, scales = ctypes.c_void_p * L, (ctypes.c_void_p * (4 * L))()
    windows = (ctypes.c_int32 * L)(*(layer.window or 0 for layer in cache.shape.layers))
    if isinstance(cache, QuantizedCache):
        held = [cache.packed[i] for i in range(L)]  # keys, values
        keys, values = (kind(*(sides[i]["codes"].data_ptr() for sides in held)) for i in (0, 1))
        scales[:] = [side[name].data_ptr() for sides in held for side in sides for name in ("scale", "minimum")]
        return windows, keys, values, scales
    found = (windows, *(kind(*(t.data_ptr() for t in side)) for side in (cache.keys, cache.values)), scales)
    cache.addresses = cache.keys, found
    return found


def step_of(cache, ids, row, position, at, logits: Tensor, hidden: Tensor | None, spent) -> tuple[Step, tuple]:
    """The structure for tokens `ids`, each of a row, at a position, with logits going to row `at` (-1: nowhere); and
    what it points to, which must live as long as the call."""
    N = len(ids)
    ints = ctypes.c_int32 * N
    arrays = ((ctypes.c_int64 * N)(*ids), ints(*row), ints(*position), ints(*at), *addresses_of(cache))
    outputs = (logits.data_ptr(), None if hidden is None else hidden.data_ptr(), None if spent is None else ctypes.addressof(spent))
    numbers = (N, cache.slots, kv_kind(cache), int(cache.dtype == torch.bfloat16), torch.get_num_threads())
    return Step(*(ctypes.addressof(array) for array in arrays), *outputs, *numbers), arrays
