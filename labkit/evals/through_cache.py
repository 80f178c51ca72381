"""What a KV format costs, read *through* the cache: KL in nats, agreement, bits a byte.

A KV cache that is quantised after a prompt was read in full precision shows nothing of its error. So the text passes in
chunks of at most 16 tokens, each attending to what the cache holds of all before, and only tokens with a context of 512
to 2,048 are scored, where at least 90 % of the keys read are quantised ones (asserted, from the format's own rule).

    kl = mean of KL(p || q)      p: the same model in one pass without a cache, q: through the cache

Documents are joined and cut into passages of `length` tokens, so that there is a long context at all. Cost: a forward
pass per 16 tokens, about ten times that of reading at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from labkit.cache import ContiguousCache, quantized_cache
from labkit.cache.in_dtype import in_dtype
from labkit.errors import BadRequest, whole_number
from labkit.evals.text import CHUNK, SLICES, Passage, PassageScore, Remembered
from labkit.plan.kv_formats import KVFormat, get_kv_format

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ThroughCache:
    """How a format is read: `chunk` tokens at once, scored from token `first` of a passage of `length`."""

    kv_format: str | KVFormat
    chunk: int = 16
    first: int = 512
    length: int = 1024
    cache: Callable | None = None  # another maker of caches than the format's own, such as a windowed one

    def __post_init__(self):
        object.__setattr__(self, "kv_format", get_kv_format(self.kv_format))
        if not 1 <= whole_number(self.chunk, "chunk") <= 16:
            raise BadRequest(f"Chunks of {self.chunk} tokens; 1 to 16, or most keys would be read as they came.")
        if not whole_number(self.first, "first", 1) < whole_number(self.length, "length") <= 2048:
            raise BadRequest(f"Passages of {self.length} tokens scored from {self.first}; give at most 2,048, and more.")

    @classmethod
    def up_to(cls, kv_format: str, limit: int | None) -> ThroughCache:
        """For at most `limit` tokens of text: shorter passages where it does not reach for a whole one."""
        if limit is not None and limit < 640:
            raise BadRequest(f"{limit} tokens are too short to be read through a cache, whose first 512 are context; "
                             "raise --limit to at least 640.")  # fmt: skip
        return cls(kv_format, length=min(1024, limit or 1024))

    def maker(self, model: nn.Module) -> Callable:
        """Makes the caches of this format for a model."""
        if self.cache is not None:
            return self.cache
        if not self.kv_format.packed:
            if self.kv_format.name not in DTYPES:
                raise BadRequest(f"KV format {self.kv_format.name} is a number for plans; it cannot be stored.")
            return lambda shape, dtype=None, **rest: ContiguousCache(shape, dtype=DTYPES[self.kv_format.name], **rest)
        frequencies = model.rotary.config.frequencies(model.config.head_dim) if self.kv_format.before_rope else None
        return quantized_cache(self.kv_format, frequencies)

    def share_quantized(self) -> float:
        """Of the keys that scored tokens read, the share that is quantised."""
        if not self.kv_format.packed:
            return 1.0
        read = packed = 0
        for position in range(self.first - 1, self.length - 1):
            held = min((position // self.chunk + 1) * self.chunk, self.length)
            read += position + 1
            packed += min(self.kv_format.packed_tokens(held), position + 1)
        return packed / read


def passages(tokenizer, limit: int | None = 4096, length: int = 1024, slices: Sequence[str] = SLICES) -> list[Passage]:
    """The evaluation documents of each slice joined, in pieces of exactly `length` tokens; `limit` tokens a slice."""
    from labkit.texts import evaluation_documents

    if whole_number(length, "length", 2) and limit is not None:
        whole_number(limit, "limit", 1)
    if not slices or not set(slices) <= set(SLICES):
        raise BadRequest(f"The slices are {slices!r}; give one or more of {', '.join(SLICES)}.")
    found = []
    for name in slices:
        held: list[int] = []
        for document in evaluation_documents(name):
            held += tokenizer.encode(document.text + "\n\n")
            if limit is not None and len(held) >= limit:
                held = held[:limit]
                break
        pieces = [held[start : start + length] for start in range(0, len(held) - length + 1, length)]
        if not pieces:
            raise BadRequest(f"{len(held)} tokens of {name} make no passage of {length}; raise the limit to {length}.")
        found += [Passage(f"{name}:{i}", name, tuple(piece), 0) for i, piece in enumerate(pieces)]
    return found


def evaluate(model: nn.Module, items: Sequence[Passage], how: ThroughCache, reference: Remembered | None = None,
             progress: Callable[[str], object] = lambda line: None) -> list[PassageScore]:  # fmt: skip
    """Score every passage; `reference` is the model in one pass without a cache unless another is given."""
    if how.share_quantized() < 0.9:
        raise BadRequest(
            f"Only {how.share_quantized():.0%} of the keys read would be quantised ones; score from a later token than "
            f"{how.first}, because {how.kv_format.name} keeps a tail of {how.kv_format.tail}."
        )
    reference = reference or Remembered(model, items)
    scores = []
    for item in items:
        scores.append(_score(model, item, how, reference))
        progress(item.id)
    return scores


@torch.inference_mode()
def _score(model: nn.Module, item: Passage, how: ThroughCache, reference: Remembered) -> PassageScore:
    tokens = torch.tensor([item.tokens], device=model.device)
    config = model.config
    cache = how.maker(model)(config.kv_shape, batch=1, capacity=tokens.shape[1], dtype=model.dtype, device=model.device)
    read = in_dtype(cache, model.dtype)
    hidden = torch.cat([model.hidden_states(piece, read) for piece in tokens.split(how.chunk, 1)], 1)[0]  # [T, E]
    expected, head = reference(item)
    nll, kl, top1 = 0.0, 0.0, 0
    for start in range(how.first - 1, tokens.shape[1] - 1, CHUNK):
        at = slice(start, min(start + CHUNK, tokens.shape[1] - 1))
        q = model.head(hidden[at]).float().log_softmax(-1)  # [t, V]
        p = (expected[at] if head is None else head(expected[at])).float().log_softmax(-1)
        targets = tokens[0, at.start + 1 : at.stop + 1, None]
        nll -= float(q.gather(1, targets).sum(dtype=torch.float64))
        kl += float((p.exp() * (p - q)).sum(dtype=torch.float64))
        top1 += int((p.argmax(-1) == q.argmax(-1)).sum())
    if kl != kl or nll != nll:
        raise BadRequest(f"Through {how.kv_format.name} passage {item.id} gives NaN; it cannot be scored.")
    nbytes = item.nbytes
    if model.tokenizer is not None:
        decoded = model.tokenizer.decode
        nbytes = len(decoded(item.tokens).encode()) - len(decoded(item.tokens[: how.first]).encode())
    return PassageScore(item.id, item.slice, tokens.shape[1] - how.first, nbytes, nll, kl, top1)
