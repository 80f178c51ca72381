"""A cache seen by layers of another dtype: what they give is converted to the cache's, what they ask for to theirs."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.cache.contract import KVCache


def in_dtype(cache: KVCache, dtype: torch.dtype) -> KVCache | InDtype:
    """The cache itself, or, where its dtype is another than the model's, a view that converts both ways."""
    return cache if cache.dtype == dtype else InDtype(cache)


class InDtype:
    """The part of the contract that one forward pass uses: lengths, advance, append and attend."""

    def __init__(self, cache: KVCache):
        self.cache, self.advance = cache, cache.advance

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.cache.lengths

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.cache.append(layer, keys.to(self.cache.dtype), values.to(self.cache.dtype))

    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        return self.cache.attend(layer, queries.to(self.cache.dtype), scale).to(queries.dtype)
