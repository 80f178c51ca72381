"""Check a request once, before any work.

Every loop (plain, speculative) starts from `prepare` and adds tokens through
`Row.take`, so that end tokens, budgets, stop strings and streaming mean the same
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from threading import Event
from typing import Any

import torch
from torch import Tensor

from labkit.cache import KVCache, cache_maker
from labkit.errors import BadRequest, OrNone, Rule, Whole, check_fields, whole_number
from labkit.generate.row import Row, Token, has_text
from labkit.generate.sampling import GREEDY, Sampling
from labkit.generate.stopping import TextStream, checked_stop
from labkit.model.decoder import Decoder
from labkit.model.tokenizer import StreamDecoder

Prompt = str | Sequence[int] | Tensor
Prompts = Prompt | Sequence[Prompt]
CacheMaker = Callable[..., KVCache]
Documents = Mapping[str, int] | Iterable[str] | None


@dataclass(frozen=True)
class Options:
    """The options of `generate` and `stream`.

    max_new_tokens  one number, or one per prompt
    sampling        how tokens are chosen; the default is greedy
    end_ids         token ids that end a row; None: the model's own, (): none
    stop            texts that end a row; they are cut off
    cache           a name of `labkit.cache.CACHES`, a function that makes a cache, or a cache, which
                    may hold the beginning of each prompt and afterwards holds all but the last token
    on_token        a function that is called with each `Token`
    cancel          a `threading.Event` or a function that returns True to stop; asked before each pass
    prefill_chunk   the number of prompt tokens per prefill pass; None: all at once
    documents       with `prefixes`: the documents a prompt was built on, {name: first token that it
                    could influence}; for several prompts a list of those
    """

    max_new_tokens: int | Sequence[int] = 128
    sampling: Sampling = GREEDY
    end_ids: int | Iterable[int] | None = None
    stop: str | Sequence[str] = ()
    cache: str | KVCache | CacheMaker = "contiguous"
    on_token: Callable[[Token], object] | None = None
    cancel: Event | Callable[[], object] | None = None
    prefill_chunk: int | None = None
    documents: Documents | Sequence[Documents] = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            sampling=Rule("a Sampling(...)", lambda value: isinstance(value, Sampling)),
            on_token=OrNone(Rule("a function of one Token", callable)),
            cancel=OrNone(
                Rule("a threading.Event, a function that returns True to stop", _can_stop)
            ),
            prefill_chunk=OrNone(Whole(1)),
        )


def _can_stop(value: object) -> bool:
    return callable(getattr(value, "is_set", value))


@dataclass(frozen=True)
class Request:
    """A request that can be carried out.

    `single`: one prompt was given by itself, not in a list.
    """

    model: Decoder
    rows: list[Row]
    single: bool
    end_ids: frozenset[int]
    cache: KVCache | CacheMaker | None
    options: Options

    @property
    def sampling(self) -> Sampling:
        return self.options.sampling

    def cancelled(self) -> bool:
        cancel: Any = self.options.cancel
        return cancel is not None and bool(getattr(cancel, "is_set", cancel)())


def prepare(model: Decoder, prompts: Prompts, options: Options, texts: bool = False) -> Request:
    """Check everything and encode the prompts.

    `texts`: whether each token comes with its text.
    """
    encoded, single = encode_prompts(model, prompts)
    budgets = _budgets(options.max_new_tokens, len(encoded))
    context = model.config.max_positions
    for i, (prompt, budget) in enumerate(zip(encoded, budgets)):
        if context is not None and len(prompt) + budget > context:
            raise BadRequest(
                f"Prompt {i} of {len(prompt)} tokens and {budget} new ones exceed the model's "
                f"context of {context}; shorten the prompt or ask for at most "
                f"{max(context - len(prompt), 0)} new tokens."
            )
    for word in options.sampling.bad_words:
        _token_ids(model, word, "A token of a bad word")
    strings, tokenizer = checked_stop(options.stop), model.tokenizer
    if strings and tokenizer is None:
        raise BadRequest("stop needs text and this model has no tokenizer; give end_ids instead.")
    cache = options.cache if isinstance(options.cache, KVCache) else cache_maker(options.cache)
    if cache is None and options.prefill_chunk is not None:
        raise BadRequest('prefill_chunk needs a cache; choose one other than "none".')
    rows = []
    for i, (prompt, budget) in enumerate(zip(encoded, budgets)):
        stream = None
        if tokenizer is not None and (texts or strings):
            decoder = StreamDecoder(tokenizer, continues=has_text(tokenizer, prompt))
            stream = TextStream(decoder, strings)
        generator = torch.Generator().manual_seed(options.sampling.seed + i)
        rows.append(Row(i, prompt, budget, generator, stream))
    request = Request(model, rows, single, _end_ids(model, options.end_ids), cache, options)
    check_given_cache(request)
    return request


def check_given_cache(request: Request) -> None:
    """Raise BadRequest if a given cache does not fit the model, the prompts and the budgets."""
    cache, rows = request.cache, request.rows
    if not isinstance(cache, KVCache):
        return
    ours, theirs = (
        [(layer.num_kv_heads, layer.head_dim) for layer in shape.layers]
        for shape in (request.model.config.kv_shape, cache.shape)
    )
    if ours != theirs:
        raise BadRequest(
            "The given cache has other layers, heads or head_dim than the model; "
            "make one with model.new_cache()."
        )
    if cache.batch != len(rows):
        raise BadRequest(
            f"The given cache has {cache.batch} rows for {len(rows)} prompts; give one row per prompt."
        )
    for row, length in zip(rows, cache.lengths):
        if length > len(row.prompt):
            raise BadRequest(
                f"Row {row.index} of the given cache holds {length} tokens and its prompt has "
                f"{len(row.prompt)}; rewind the cache, or give the whole text as the prompt."
            )
        needed = len(row.prompt) + row.budget - 1  # the last token is never fed
        if row.budget and cache.capacity is not None and needed > cache.capacity:
            raise BadRequest(
                f"Prompt {row.index} of {len(row.prompt)} tokens and {row.budget} new ones need "
                f"{needed} tokens and the given cache has a capacity of {cache.capacity}; "
                "make it larger or ask for fewer."
            )


def encode_prompts(model: Decoder, prompts: Prompts) -> tuple[list[tuple[int, ...]], bool]:
    """Return the token ids of each prompt, and whether one prompt was given by itself."""
    many: Any = prompts.tolist() if isinstance(prompts, Tensor) else prompts
    if not isinstance(many, Sequence):
        raise BadRequest(f"The prompt is {many!r}; give a text, token ids, or a list of those.")
    single = isinstance(many, str) or len(many) == 0 or isinstance(many[0], Integral)
    many = [many] if single else many
    return [_encode(model, prompt, i) for i, prompt in enumerate(many)], single


def _encode(model: Decoder, prompt: Any, index: int) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise BadRequest("The prompt is text and this model has no tokenizer; give token ids.")
        prompt = model.tokenizer.encode(prompt)
    prompt = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if not isinstance(prompt, Sequence):
        raise BadRequest(f"Prompt {index} is {prompt!r}; give a text or token ids.")
    if len(prompt):
        return _token_ids(model, prompt, "A prompt token")
    if model.config.bos_id is None:
        raise BadRequest(f"Prompt {index} is empty and this model has no BOS token; give a text.")
    return (model.config.bos_id,)


def _end_ids(model: Decoder, end_ids: int | Iterable[int] | None) -> frozenset[int]:
    if end_ids is None:
        end_ids = model.config.eos_ids or ()
    many = end_ids if isinstance(end_ids, Iterable) else (end_ids,)
    return frozenset(_token_ids(model, many, "An end token"))


def _token_ids(model: Decoder, ids: Iterable[object], what: str) -> tuple[int, ...]:
    checked = tuple(whole_number(id, what) for id in ids)
    size = model.config.vocab_size
    for id in checked:
        if not 0 <= id < size:
            raise BadRequest(f"{what} is {id}; this model's token ids go from 0 to {size - 1}.")
    return checked


def _budgets(max_new_tokens: int | Sequence[int], rows: int) -> list[int]:
    many = isinstance(max_new_tokens, Sequence) and not isinstance(max_new_tokens, str)
    budgets: Any = max_new_tokens if many else [max_new_tokens] * rows
    if len(budgets) != rows:
        raise BadRequest(
            f"max_new_tokens has {len(budgets)} numbers for {rows} prompts; give one for all or one each."
        )
    return [whole_number(budget, "max_new_tokens", 0) for budget in budgets]
