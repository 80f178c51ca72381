"""Check a request once, before any work.

The plain and the speculative loop both start from `prepare` and add tokens with
`Row.take`. So end tokens, budgets, stop strings and streaming work the same in both.
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
    end_ids         token ids that end a row; None: those of the model, (): none
    stop            one or more texts that end a row; they are not part of its text
    cache           a name of `labkit.cache.CACHES`, a function that makes a cache, or a cache.
                    A given cache may have the beginning of each prompt. Afterwards it has all
                    tokens but the last.
    on_token        a function that is called with each `Token`
    cancel          a `threading.Event`, or a function that returns True to stop; it is checked
                    before each pass
    prefill_chunk   the maximum number of prompt tokens per prefill pass; None: all at once
    documents       used with `prefixes`: the documents that a prompt was made from,
                    {name: first token that it could influence}, or a list with one per prompt
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
            cancel=OrNone(Rule("a threading.Event, a function that returns True", _can_stop)),
            prefill_chunk=OrNone(Whole(1)),
        )


def _can_stop(value: object) -> bool:
    return callable(getattr(value, "is_set", value))


@dataclass(frozen=True)
class Request:
    """A request whose arguments are checked.

    `single` is True if one prompt was given, not a list.
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

    `texts` says whether each token needs its text. Raises BadRequest.
    """
    many: Any = prompts.tolist() if isinstance(prompts, Tensor) else prompts
    if not isinstance(many, Sequence):
        raise BadRequest(f"The prompt is {many!r}; give a text, token ids, or a list of those.")
    single = isinstance(many, str) or len(many) == 0 or isinstance(many[0], Integral)
    encoded = [_encode(model, prompt, i) for i, prompt in enumerate([many] if single else many)]
    budgets = _budgets(options.max_new_tokens, len(encoded))
    context = model.config.max_positions
    for i, (prompt, budget) in enumerate(zip(encoded, budgets)):
        if context is not None and len(prompt) + budget > context:
            raise BadRequest(
                f"Prompt {i} has {len(prompt)} tokens, and {budget} new ones exceed the model's "
                f"context of {context}; shorten the prompt or lower max_new_tokens."
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
    ends: Any = model.config.eos_ids or () if options.end_ids is None else options.end_ids
    ends = _token_ids(model, ends if isinstance(ends, Iterable) else [ends], "An end token")
    request = Request(model, rows, single, frozenset(ends), cache, options)
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
            "The given cache has other layers than the model; make one with model.new_cache()."
        )
    if cache.batch != len(rows):
        raise BadRequest(
            f"The given cache has {cache.batch} rows for {len(rows)} prompts; give one row each."
        )
    for row, length in zip(rows, cache.lengths):
        size = len(row.prompt)
        if length > size:
            raise BadRequest(
                f"Row {row.index} of the given cache has {length} tokens and its prompt {size}; "
                "rewind the cache, or give the whole text as the prompt."
            )
        needed = size + row.budget - 1  # the last token is never read
        if row.budget and cache.capacity is not None and needed > cache.capacity:
            raise BadRequest(
                f"Prompt {row.index} and its new tokens need {needed} cached tokens, and the given "
                f"cache has a capacity of {cache.capacity}; make it larger or ask for fewer tokens."
            )


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


def _token_ids(model: Decoder, ids: Iterable[object], what: str) -> tuple[int, ...]:
    checked, size = tuple(whole_number(id, what) for id in ids), model.config.vocab_size
    for id in checked:
        if not 0 <= id < size:
            raise BadRequest(f"{what} is {id}; this model's token ids go from 0 to {size - 1}.")
    return checked


def _budgets(max_new_tokens: Any, rows: int) -> list[int]:
    each = max_new_tokens if isinstance(max_new_tokens, Sequence) else [max_new_tokens] * rows
    if len(each) != rows:
        raise BadRequest(
            f"max_new_tokens has {len(each)} numbers for {rows} prompts; give one each."
        )
    return [whole_number(budget, "max_new_tokens", 0) for budget in each]
