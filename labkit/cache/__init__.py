"""KV caches by name. A new cache is one file and one line here; tests, benches and commands read this table."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labkit.cache.contiguous import ContiguousCache
from labkit.cache.contract import KVCache
from labkit.cache.eviction import KeyNorm, Observed
from labkit.cache.paged import PagedCache, paged_cache
from labkit.cache.quantized import QuantizedCache, quantized_cache
from labkit.cache.window import WindowedCache, windowed_cache
from labkit.errors import BadRequest
from labkit.plan.memory import KVShape

CACHES: dict[str, Callable[..., KVCache] | None] = {
    "none": None,  # an equal choice: the whole text is computed again for every token
    "contiguous": ContiguousCache,
    "windowed": WindowedCache,  # each layer keeps what its own window needs
    "paged": PagedCache,  # each row takes blocks of 16 tokens as it grows, and rows may share them
    **{name: quantized_cache(name) for name in ("int8", "int4", "int2", "fp8", "nvfp4")},
    "key_norm": KeyNorm,
    "observed": Observed,
}
EXACT = ("contiguous", "windowed", "paged")  # give the answer that a recomputation gives


def cache_maker(kind: str | Callable[..., KVCache]) -> Callable[..., KVCache] | None:
    """The function that makes caches of the kind named (None for "none"); a function stands for itself."""
    if callable(kind):
        return kind
    if not isinstance(kind, str) or kind not in CACHES:
        raise BadRequest(f"There is no cache named {kind!r}; choose one of {', '.join(sorted(CACHES))}.")
    return CACHES[kind]


def make_cache(kind: str | Callable[..., KVCache], shape: KVShape, batch: int = 1, capacity: int | None = None,
               dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> KVCache | None:
    """A cache of the kind named (None for "none"), or what a factory of the same arguments makes."""
    maker = cache_maker(kind)
    return None if maker is None else maker(shape, batch=batch, capacity=capacity, dtype=dtype, device=device)


__all__ = ["CACHES", "EXACT", "ContiguousCache", "KVCache", "PagedCache", "QuantizedCache", "WindowedCache", "cache_maker", "make_cache",
           "paged_cache", "quantized_cache", "windowed_cache"]
