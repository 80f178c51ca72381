"""How likely a model finds given answers to a prompt: the measure of tasks without generation.

    log p(answer | prompt) = sum over the answer's tokens of log p(token | prompt, tokens before)

Values are in nats. The prompt and each answer are tokenized as one string, because "A" and " A"
are different tokens and a tokenizer may merge across the border. The context is the longest start
that all these strings share with the tokens of the prompt alone; the rest of each string is the
answer. So all answers are scored from one place. A prompt that ends in a chat template is given as
token ids and is not changed.

Cost: the prompt is read once into a cache, whose row is repeated for the answers. A header that
many prompts share is read once. It is always split into the same pieces, so that no result depends
on earlier prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from labkit.cache import ContiguousCache
from labkit.cache.contract import in_dtype
from labkit.cache.prefix.entry import common
from labkit.errors import BadRequest
from labkit.generate import Completion, generate

PIECE = 128  # the number of tokens whose distributions are in memory at once


class NotScorable(BadRequest):
    """An item has no score: its scores are NaN or equal, or its prompt is too long."""


@dataclass(frozen=True)
class Split:
    """A prompt and its answers as token ids.

    context: the tokens that all answers share.
    tails: the other tokens of each answer.
    trimmed: the number of tokens that were removed from the left of the context.
    """

    context: tuple[int, ...]
    tails: tuple[tuple[int, ...], ...]
    trimmed: int = 0


def split(tokenizer, prompt: str | Sequence[int], answers: Sequence[str]) -> Split:
    """Return the token ids of a prompt and of the answers after it.

    The prompt is text, or ids that end where the answer begins. Raises BadRequest if an
    answer is empty or if the prompt has no tokens.
    """
    if not answers or not all(answers):
        empty = sum(not answer for answer in answers)
        raise BadRequest(f"Of {len(answers)} answers, {empty} are empty; give answers with text.")
    if isinstance(prompt, str):
        wholes = [tokenizer.encode(prompt + answer) for answer in answers]
        start = min(common(tokenizer.encode(prompt), whole) for whole in wholes)
    else:
        wholes = [[*prompt, *continuation_ids(tokenizer, answer)] for answer in answers]
        start = len(prompt)
    if start == 0:
        raise BadRequest("The prompt has no token before the answer; give a longer prompt.")
    return Split(tuple(wholes[0][:start]), tuple(tuple(whole[start:]) for whole in wholes))


def continuation_ids(tokenizer, text: str) -> list[int]:
    """Return the ids of a text as it follows a line break: without BOS or an added space."""
    encode = partial(tokenizer.encode, add_bos=False, special=False)
    before, whole = encode("\n"), encode("\n" + text)
    # The text may start with something that merges with a line break.
    return whole[len(before) :] if whole[: len(before)] == before else encode(text)


def fit(parts: Split, limit: int, bos_id: int | None = None) -> Split:
    """Trim the context from the left until the input has up to `limit` tokens.

    BOS and the answers stay. The last token of an answer is not an input. Raises
    NotScorable if no context would be left.
    """
    longest = max(map(len, parts.tails))
    excess = len(parts.context) + longest - 1 - limit
    if excess <= 0:
        return parts
    bos = parts.context[:1] if parts.context[0] == bos_id else ()
    rest = parts.context[len(bos) :]
    if excess >= len(rest):
        place = f"in a context of {limit} tokens"
        raise NotScorable(f"An answer of {longest} tokens leaves no room for its prompt {place}.")
    return Split((*bos, *rest[excess:]), parts.tails, excess)


class Reader:
    """Read prompts with one model.

    `make_cache` and `chunk` read the prompts in chunks through another cache, such as a
    quantized KV cache.
    """

    def __init__(self, model, make_cache: Callable | None = None, chunk: int | None = None):
        self.model, self.make_cache, self.chunk = model, make_cache, chunk
        self._cache = None  # one row with the last header
        self._header: tuple[int, ...] = ()
        self._read: tuple[int, ...] = ()  # all tokens of that row

    @torch.inference_mode()
    def log_likelihoods(self, parts: Split, header: int = 0) -> list[float]:
        """Return the log-probability of every tail, in nats.

        The first `header` tokens of the context stay cached for the next prompt that starts
        with them. Raises NotScorable if a log-probability is NaN or infinite.
        """
        parts = fit(parts, self.model.config.max_positions, self.model.config.bos_id)
        room = max(map(len, parts.tails))
        cache, first = self.read(parts.context, 0 if parts.trimmed else header, room)
        self._read = parts.context
        rows = [[float(first[tail[0]])] for tail in parts.tails]
        longer = [i for i, tail in enumerate(parts.tails) if len(tail) > 1]
        if longer:
            cache.select([0] * len(longer))
            for start in range(0, room - 1, PIECE):
                # Each piece ends with a token that is predicted and not read.
                pieces = [parts.tails[i][start : start + PIECE + 1] for i in longer]
                counts = [max(len(piece) - 1, 0) for piece in pieces]
                T = max(counts)
                padded = [[*piece[:-1], *[0] * (T - count)] for piece, count in zip(pieces, counts)]
                tokens = torch.tensor(padded, device=self.model.device)
                logits = self.model(tokens, self._view(cache), counts)  # [n, T, V]
                for i, piece, count, row in zip(longer, pieces, counts, logits):
                    targets = torch.tensor(piece[1:], device=row.device, dtype=torch.long)
                    row = row[:count].float().log_softmax(-1)
                    rows[i] += row.gather(1, targets[:, None])[:, 0].tolist()
        if not all(math.isfinite(value) for row in rows for value in row):
            raise NotScorable("The model's log-probabilities contain NaN or infinity.")
        return [math.fsum(row) for row in rows]

    def write(self, prompt: str | Sequence[int], max_new_tokens: int) -> Completion:
        """Return the greedy completion of a prompt.

        If `log_likelihoods` has just read a start of the prompt, it is not read again.
        """
        ids = self.model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        config = self.model.config
        room = Split(tuple(ids), ((0,) * max_new_tokens,))
        ids = list(fit(room, config.max_positions, config.bos_id).context)
        cache = self.make_cache or "contiguous"
        if self.make_cache is None and self._read and self._read == tuple(ids[: len(self._read)]):
            cache = self._cache
            cache.select([0])
            cache.rewind(len(self._read))
        self._read = ()
        options = {"max_new_tokens": max_new_tokens, "prefill_chunk": self.chunk}
        return generate(self.model, ids, cache=cache, **options)

    def read(self, context: Sequence[int], header: int = 0, room: int = 1):
        """Return a cache of one row with the context, and log-probabilities [V] of the next token.

        `room` is the number of tokens that the cache can take after the context.
        """
        shares = self.make_cache is None and header < len(context)
        shared = tuple(context[:header]) if shares else ()
        cache = self._begin(shared, len(context) + room)
        rest = torch.tensor([context[len(shared) :]], device=self.model.device)
        for piece in rest.split(self.chunk or rest.shape[1], 1):
            logits = self.model(piece, self._view(cache), last_only=True)
        return cache, logits[0, -1].float().log_softmax(-1)

    def _begin(self, shared: tuple[int, ...], capacity: int):
        """Return a cache of one row that stores the shared header."""
        model, shape = self.model, self.model.config.kv_shape
        where = {"dtype": model.dtype, "device": model.device}
        if self.make_cache is not None:
            return self.make_cache(shape, batch=1, capacity=capacity, **where)
        if self._cache is not None and shared and shared == self._header:
            self._cache.select([0])
            self._cache.rewind(len(shared))
        else:
            self._cache, self._header = ContiguousCache(shape, **where), shared
            if shared:
                model(torch.tensor([shared], device=model.device), self._cache, last_only=True)
        return self._cache

    def _view(self, cache):
        """Return the cache in the dtype of the model."""
        return cache if self.make_cache is None else in_dtype(cache, self.model.dtype)
