"""What was asked for, checked once and before any work; and a `Row`, one text as it grows.

Every loop (plain decoding, speculative, batching) starts from `prepare` and adds tokens through `Row.take`,
so that end tokens, budgets, stop strings and streaming mean the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral

import torch

from labkit.cache import KVCache, cache_maker
from labkit.errors import BadRequest, whole_number
from labkit.generate.completion import Completion, StopReason, Token
from labkit.generate.sampling import Sampling
from labkit.generate.stopping import TextStream, checked_stop
from labkit.model.tokenizer import StreamDecoder


@dataclass
class Row:
    """One text: its prompt, the tokens so far, and why it ended. `history` is prompt and tokens together."""

    index: int
    prompt: tuple[int, ...]
    budget: int
    generator: torch.Generator | None = None  # None: nothing is drawn for it
    stream: TextStream | None = None
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    reason: StopReason | None = None

    def __post_init__(self):
        self.history = list(self.prompt)
        if self.budget == 0:
            self.reason = "length"

    def take(self, token: int, time_s: float, end_ids: frozenset[int]) -> Token:
        """Add one token; sets `reason` where the row ends with it."""
        self.tokens.append(token)
        self.history.append(token)
        self.times_s.append(time_s)
        text, stopped = None, False
        if token in end_ids:
            self.reason, text = "end_token", ""
        elif self.stream is not None:
            text, stopped = self.stream.push(token)
        if stopped:
            self.reason = "stop_string"
        elif self.reason is None and len(self.tokens) >= self.budget:
            self.reason = "length"
        if self.stream is None:
            text = None
        elif self.reason is not None and not stopped:
            text += self.stream.finish()
        return Token(token, text, self.index, self.reason)

    def cancel(self) -> Token:
        """End here: a closing `Token` without an id, with the text that was held back."""
        self.reason = "cancelled"
        return Token(None, None if self.stream is None else self.stream.finish(), self.index, self.reason)

    def completion(self, model) -> Completion:
        if self.stream is not None:
            text = self.stream.text
        elif model.tokenizer is not None:
            said = self.tokens[:-1] if self.reason == "end_token" else self.tokens
            text = model.tokenizer.decode(said, continues=_says_something(model, self.prompt))
        else:
            text = None
        return Completion(self.prompt, tuple(self.tokens), text, self.reason, tuple(self.times_s))


@dataclass(frozen=True)
class Request:
    """A request that can be carried out."""

    model: torch.nn.Module
    rows: list[Row]
    single: bool  # one prompt was given by itself, not in a list
    sampling: Sampling
    end_ids: frozenset[int]
    cache: KVCache | Callable[..., KVCache] | None  # a given one, what makes one, or none at all
    prefill_chunk: int | None
    cancelled: Callable[[], bool]


def prepare(model, prompts, *, max_new_tokens, sampling, end_ids, stop, cache, cancel, prefill_chunk, texts) -> Request:
    """Check everything and encode the prompts; `texts`: whether the text is wanted token by token."""
    if not isinstance(sampling, Sampling):
        raise BadRequest(f"sampling is {sampling!r}; give a Sampling(temperature=..., ...).")
    encoded, single = encode_prompts(model, prompts)
    budgets = _budgets(max_new_tokens, len(encoded))
    context = model.config.context
    for row, (prompt, budget) in enumerate(zip(encoded, budgets)):
        if context is not None and len(prompt) + budget > context:
            raise BadRequest(
                f"Prompt {row} of {len(prompt)} tokens and {budget} new ones exceed the model's context of {context}; "
                f"shorten the prompt or ask for at most {max(context - len(prompt), 0)}."
            )
    cache = cache if isinstance(cache, KVCache) else cache_maker(cache)
    ends = _end_ids(model, end_ids)
    for word in sampling.bad_words:
        for token in word:
            _token_id(model, token, "A token of a bad word")
    strings = checked_stop(stop)
    if strings and model.tokenizer is None:
        raise BadRequest("Stop strings need text and this model has no tokenizer; give end_ids instead.")
    if prefill_chunk is not None:
        if whole_number(prefill_chunk, "prefill_chunk") < 1:
            raise BadRequest(f"prefill_chunk is {prefill_chunk}; give at least 1 token, or None for the whole prompt.")
        if cache is None:
            raise BadRequest('prefill_chunk needs a cache to keep the earlier chunks in; choose one other than "none".')
    if isinstance(cache, KVCache):
        _check_given(cache, model, encoded, budgets)
    rows = []
    for index, (prompt, budget) in enumerate(zip(encoded, budgets)):
        generator = torch.Generator().manual_seed(sampling.seed + index)
        text = None
        if model.tokenizer is not None and (texts or strings):
            text = TextStream(StreamDecoder(model.tokenizer, continues=_says_something(model, prompt)), strings)
        rows.append(Row(index, prompt, budget, generator, text))
    return Request(model, rows, single, sampling, ends, cache, prefill_chunk, _cancelled(cancel))


def wants_tokens(on_token) -> bool:
    """Whether each token is to be handed to somebody; what cannot be called is refused."""
    if on_token is not None and not callable(on_token):
        raise BadRequest(f"on_token is {on_token!r}; give a function of one Token, or None.")
    return on_token is not None


def encode_prompts(model, prompts) -> tuple[list[tuple[int, ...]], bool]:
    """Token ids of each prompt, and whether one was given by itself instead of a list."""
    if isinstance(prompts, torch.Tensor):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise BadRequest(f"The prompt is {prompts!r}; give a text, token ids, or a list of those.")
    single = isinstance(prompts, str) or len(prompts) == 0 or isinstance(prompts[0], Integral)
    encoded = []
    for row, prompt in enumerate([prompts] if single else prompts):
        if isinstance(prompt, str):
            if model.tokenizer is None:
                raise BadRequest("The prompt is text and this model has no tokenizer; give token ids.")
            prompt = model.tokenizer.encode(prompt)
        prompt = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt
        if not isinstance(prompt, Sequence):
            raise BadRequest(f"Prompt {row} is {prompt!r}; give a text or token ids.")
        tokens = tuple(_token_id(model, token, "A prompt token") for token in prompt)
        if not tokens:
            if model.config.bos_id is None:
                raise BadRequest(f"Prompt {row} is empty and this model has no BOS token to begin with; give a text.")
            tokens = (model.config.bos_id,)
        encoded.append(tokens)
    return encoded, single


def _end_ids(model, end_ids) -> frozenset[int]:
    if end_ids is None:
        end_ids = model.config.eos_ids or ()
    elif not hasattr(end_ids, "__iter__"):
        end_ids = (end_ids,)
    return frozenset(_token_id(model, token, "An end token") for token in end_ids)


def _says_something(model, prompt: tuple[int, ...]) -> bool:
    """Whether text precedes the first new token, which decides whose a leading space is."""
    return any(token not in model.tokenizer.special_ids for token in prompt)


def _token_id(model, token: object, what: str) -> int:
    number, size = whole_number(token, what), model.config.vocab_size
    if not 0 <= number < size:
        raise BadRequest(f"{what} is {number}; this model's token ids go from 0 to {size - 1}.")
    return number


def _budgets(max_new_tokens: int | Sequence[int], rows: int) -> list[int]:
    many = isinstance(max_new_tokens, Sequence) and not isinstance(max_new_tokens, str)
    budgets = list(max_new_tokens) if many else [max_new_tokens] * rows
    if len(budgets) != rows:
        raise BadRequest(f"max_new_tokens has {len(budgets)} numbers for {rows} prompts; give one number or one each.")
    for budget in budgets:
        if whole_number(budget, "max_new_tokens") < 0:
            raise BadRequest(f"max_new_tokens is {budget}; give a whole number from 0 up.")
    return budgets


def _check_given(cache: KVCache, model, prompts: list[tuple[int, ...]], budgets: list[int]) -> None:
    """A given cache must fit the model and hold the beginning of each prompt: its length at least can be checked."""
    ours, theirs = model.config.kv_shape.layers, cache.shape.layers
    if [(a.num_kv_heads, a.head_dim) for a in ours] != [(a.num_kv_heads, a.head_dim) for a in theirs]:
        raise BadRequest("The given cache has other layers, heads or head_dim than the model; make one by new_cache().")
    if cache.batch != len(prompts):
        raise BadRequest(f"The given cache has {cache.batch} rows for {len(prompts)} prompts; give one row a prompt.")
    for row, (prompt, budget, held) in enumerate(zip(prompts, budgets, cache.lengths)):
        if held > len(prompt):
            raise BadRequest(
                f"Row {row} of the given cache holds {held} tokens and prompt {row} has {len(prompt)}; "
                "the cache may hold the prompt's beginning only, so rewind it or give the whole text as the prompt."
            )
        needed = len(prompt) + max(budget - 1, 0)  # the last token is never fed
        if budget and cache.capacity is not None and needed > cache.capacity:
            raise BadRequest(
                f"Prompt {row} of {len(prompt)} tokens and {budget} new ones need {needed} tokens and the given cache "
                f"has a capacity of {cache.capacity}; make it larger or ask for fewer."
            )


def _cancelled(cancel) -> Callable[[], bool]:
    if cancel is None:
        return lambda: False
    asked = getattr(cancel, "is_set", cancel)
    if not callable(asked):
        raise BadRequest(f"cancel is {cancel!r}; give a threading.Event or a function that returns True to stop.")
    return asked
