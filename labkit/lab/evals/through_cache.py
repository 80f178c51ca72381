"""How a text is read *through* a quantized KV cache, so that the cost of its format shows.

If the prompt is read in full precision and the cache is quantized afterwards, nothing that was
read had an error. So the text passes in chunks of up to 16 tokens, each attending to what the
cache stores of all before. Only tokens with a context of 512 to 2,048 tokens are scored, and at
least 90 % of the keys that they read must be quantized ones (checked by the format's own rule).

Cost: a forward pass per 16 tokens, about ten times the cost of reading a text at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.cache import ContiguousCache, quantized_cache
from labkit.cache.contract import in_dtype
from labkit.errors import BadRequest, Whole, check_fields
from labkit.formats import DTYPES, torch_dtype
from labkit.lab.evals.passages import Passage, joined
from labkit.plan.kv_formats import KVFormat, get_kv_format


@dataclass(frozen=True)
class ThroughCache:
    """Read `chunk` tokens at once; score from token `first` of a passage of `length` tokens.

    `cache` is another maker of caches than the format's own, such as a windowed one.
    """

    kv_format: str | KVFormat
    chunk: int = 16
    first: int = 512
    length: int = 1024
    cache: Callable | None = None

    def __post_init__(self):
        object.__setattr__(self, "kv_format", get_kv_format(self.kv_format))
        check_fields(self, chunk=Whole(1, 16), length=Whole(2, 2048))
        check_fields(self, first=Whole(1, self.length - 1))

    @classmethod
    def up_to(cls, kv_format: str, limit: int | None) -> ThroughCache:
        """Return a reader for `limit` tokens; passages are shorter if that is below 1,024."""
        if limit is not None and limit < 640:
            raise BadRequest(
                f"{limit} tokens are too few to be read through a cache, whose first 512 are "
                "context; raise --limit to at least 640."
            )
        return cls(kv_format, length=min(1024, limit or 1024))

    def passages(self, tokenizer, slice: str, limit: int | None = 4096) -> list[Passage]:
        """Return the documents of a slice, joined, in passages of exactly `length` tokens."""
        return joined(tokenizer, slice, limit, self.length, self.first)

    def maker(self, model: nn.Module) -> Callable:
        """Return a function that makes the caches of this format for a model."""
        name = self.kv_format.name
        if self.cache is not None:
            return self.cache
        if self.kv_format.packed:
            rotary, head_dim = model.rotary, model.config.head_dim
            before = self.kv_format.before_rope
            return quantized_cache(
                self.kv_format, rotary.config.frequencies(head_dim) if before else None
            )
        if name not in DTYPES:
            raise BadRequest(
                f"KV format {name} is for plans only and cannot be stored; choose int8, int4 or "
                f"one of {', '.join(DTYPES)}."
            )
        return lambda shape, dtype=None, **rest: ContiguousCache(
            shape, dtype=torch_dtype(name), **rest
        )

    def share_quantized(self) -> float:
        """Return the share of quantized keys among those that scored tokens read."""
        if not self.kv_format.packed:
            return 1.0
        read = packed = 0
        for position in range(self.first - 1, self.length - 1):
            stored = min((position // self.chunk + 1) * self.chunk, self.length)
            read += position + 1
            packed += min(self.kv_format.packed_tokens(stored), position + 1)
        return packed / read

    def read(self, model: nn.Module, tokens: Tensor) -> tuple[Tensor, nn.Module]:
        """Read tokens [1, T] through a new cache; return hidden states [T, E] and the head.

        Raises BadRequest if fewer than 90 % of the keys read would be quantized.
        """
        if self.share_quantized() < 0.9:
            raise BadRequest(
                f"Only {self.share_quantized():.0%} of the keys read would be quantized ones; score "
                f"from a later token than {self.first}, because {self.kv_format.name} keeps a tail "
                f"of {self.kv_format.tail}."
            )
        where = {"dtype": model.dtype, "device": model.device}
        cache = self.maker(model)(model.config.kv_shape, batch=1, capacity=tokens.shape[1], **where)
        view = in_dtype(cache, model.dtype)
        pieces = [model.hidden_states(piece, view)[0] for piece in tokens.split(self.chunk, 1)]
        return torch.cat(pieces), model.head
