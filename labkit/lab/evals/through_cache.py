"""Read a text through a quantized KV cache, so that the cost of the cache's format shows.

If a model reads a prompt in full precision and quantizes the cache afterwards, the keys and values
that it read had no error. So the text is read in chunks of up to 16 tokens. Each chunk attends to
the stored keys and values of all earlier ones. Only tokens with a context of 512 to 2,048 tokens are
scored. At least 90 % of the keys that they read must be quantized; the format's own rule decides
which are.

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

    `cache` makes caches in place of the format's own, for example windowed ones.
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
        """Return a reader for `limit` tokens, in passages of up to 1,024 tokens.

        Raises BadRequest for fewer than 640 tokens, because the first 512 are context.
        """
        if limit is not None and limit < 640:
            raise BadRequest(f"--limit is {limit}; a KV format needs 640 tokens or more.")
        return cls(kv_format, length=min(1024, limit or 1024))

    def passages(self, tokenizer, slice: str, limit: int | None = 4096) -> list[Passage]:
        """Join the documents of a slice; return passages of exactly `length` tokens."""
        return joined(tokenizer, slice, limit, self.length, self.first)

    def maker(self, model: nn.Module) -> Callable:
        """Return a function that makes the caches of this format for a model."""
        if self.cache is not None:
            return self.cache
        name, frequencies = self.kv_format.name, None
        if self.kv_format.packed:
            if self.kv_format.before_rope:
                frequencies = model.rotary.config.frequencies(model.config.head_dim)
            return quantized_cache(self.kv_format, frequencies)
        if name not in DTYPES:
            allowed = f"int8, int4 or one of {', '.join(DTYPES)}"
            raise BadRequest(f"KV format {name} is for plans only; choose {allowed}.")
        dtype = torch_dtype(name)
        return lambda shape, **rest: ContiguousCache(shape, **rest | {"dtype": dtype})

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

        Raises BadRequest if less than 90 % of the keys read would be quantized.
        """
        if self.share_quantized() < 0.9:
            share, tail = f"{self.share_quantized():.0%}", self.kv_format.tail
            raise BadRequest(
                f"Only {share} of the keys read would be quantized, because {self.kv_format.name} "
                f"keeps a tail of {tail} tokens; score from a later token than {self.first}."
            )
        where = {"dtype": model.dtype, "device": model.device}
        cache = self.maker(model)(model.config.kv_shape, batch=1, capacity=tokens.shape[1], **where)
        view = in_dtype(cache, model.dtype)
        pieces = [model.hidden_states(piece, view)[0] for piece in tokens.split(self.chunk, 1)]
        return torch.cat(pieces), model.head
