"""KV caches by name.

To add a cache, write one file and add one line to `CACHES`. Tests, benchmarks and
commands read this table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.cache.contiguous import ContiguousCache
from labkit.cache.contract import KVCache
from labkit.cache.eviction import KeyNorm, Observed
from labkit.cache.paged.cache import PagedCache
from labkit.cache.paged.cache import paged_cache as paged_cache
from labkit.cache.quantized.cache import QuantizedCache as QuantizedCache
from labkit.cache.quantized.cache import quantized_cache
from labkit.cache.window import WindowedCache
from labkit.cache.window import windowed_cache as windowed_cache
from labkit.errors import BadRequest
from labkit.plan.kv import KVShape

Maker = Callable[..., KVCache]

CACHES: dict[str, Maker | None] = {
    "none": None,  # no cache: the whole text is computed again for every token
    "contiguous": ContiguousCache,
    "windowed": WindowedCache,  # each layer keeps what its own window needs
    "paged": PagedCache,  # each row takes blocks of 16 tokens as it grows, and rows may share them
    **{name: quantized_cache(name) for name in ("int8", "int4", "int2", "fp8", "nvfp4")},
    "key_norm": KeyNorm,
    "observed": Observed,
}
EXACT = ("contiguous", "windowed", "paged")  # these give the same answer as no cache


def cache_maker(kind: str | Maker) -> Maker | None:
    """Return the function that makes caches of a kind, or None for "none".

    A function is returned as it is. Raises BadRequest for an unknown name.
    """
    if callable(kind):
        return kind
    if not isinstance(kind, str) or kind not in CACHES:
        known = ", ".join(sorted(CACHES))
        raise BadRequest(f"There is no cache named {kind!r}; choose one of {known}.")
    return CACHES[kind]


def make_cache(kind: str | Maker, shape: KVShape, *sizes: Any, **named: Any) -> KVCache | None:
    """Make a cache of a kind, which is a name or a function of the other arguments.

    The other arguments are those of KVCache. Returns None for "none".
    """
    maker = cache_maker(kind)
    return None if maker is None else maker(shape, *sizes, **named)
