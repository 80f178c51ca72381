"""How likely a model finds given answers to a prompt: the measurement of tasks without generation.

    log p(answer | prompt) = sum over the answer's tokens of log p(token | prompt, tokens before)

Values are in nats. The whole string is tokenized, because "A" and " A" are different tokens and a
tokenizer may merge across the border. The answer's tokens are those behind the longest start that
all strings and the prompt alone share, so all answers are scored from one place. A prompt that
ends in a chat template is given as token ids and stays as it is.
Cost: the prompt is read once into a cache, whose row is repeated for the answers. A header that
many prompts share is read once for all, always in the same pieces, so that no result depends on
what was read before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from labkit.cache import ContiguousCache
from labkit.cache.contract import in_dtype
from labkit.cache.prefix.entry import common
from labkit.errors import BadRequest
from labkit.generate import Completion, generate

PIECE = 128  # tokens of an answer whose distributions are in memory at once


class NotScorable(BadRequest):
    """An item without an answer: NaN or equal scores, or a prompt too long. Never a zero."""


@dataclass(frozen=True)
class Likelihood:
    """One answer. `first`: its first token's log-probability; `greedy`: greedy decoding writes it."""

    nats: float
    tokens: int
    first: float
    greedy: bool


@dataclass(frozen=True)
class Split:
    """The `context` that all answers share and each answer's tail.

    `trimmed` tokens were cut off the left of the context.
    """

    context: tuple[int, ...]
    tails: tuple[tuple[int, ...], ...]
    trimmed: int = 0


def split(tokenizer, prompt: str | Sequence[int], answers: Sequence[str]) -> Split:
    """Return the token ids of a prompt and of the answers behind it.

    The prompt is text, or ids that end where the answer begins.
    """
    if not answers or not all(answers):
        raise BadRequest(
            f"{len(answers)} answers, of which {sum(not a for a in answers)} are empty; give at "
            "least one, all with text."
        )
    if isinstance(prompt, str):
        wholes = [tokenizer.encode(prompt + answer) for answer in answers]
        start = min(common(tokenizer.encode(prompt), whole) for whole in wholes)
    else:
        wholes = [[*prompt, *continuation_ids(tokenizer, answer)] for answer in answers]
        start = len(prompt)
    if start == 0:
        raise BadRequest(
            "The prompt has no token of its own, so nothing predicts the answer's first token; "
            "give some text."
        )
    return Split(tuple(wholes[0][:start]), tuple(tuple(whole[start:]) for whole in wholes))


def continuation_ids(tokenizer, text: str) -> list[int]:
    """Return a text's ids as they follow a line break: no BOS, no space added in front."""
    before, whole = (
        tokenizer.encode(piece, add_bos=False, special=False) for piece in ("\n", "\n" + text)
    )
    if whole[: len(before)] == before:
        return whole[len(before) :]
    # It starts with something that merges with a line break.
    return tokenizer.encode(text, add_bos=False, special=False)


def fit(parts: Split, limit: int, bos_id: int | None = None) -> Split:
    """Trim the context from the left to `limit` tokens of input; BOS and answers stay.

    The last scored token is not an input. Raises NotScorable if no context would be left.
    """
    longest = max(map(len, parts.tails)) - 1
    excess = len(parts.context) + longest - limit
    if excess <= 0:
        return parts
    kept = parts.context[:1] if parts.context[0] == bos_id else ()
    rest = parts.context[len(kept) :]
    if excess >= len(rest):
        raise NotScorable(
            f"An answer of {longest + 1} tokens leaves no room for its prompt in a context of {limit}."
        )
    return Split((*kept, *rest[excess:]), parts.tails, excess)


class Reader:
    """Read prompts with one model.

    `make_cache` and `chunk` read through another cache in chunks (a quantized KV cache).
    """

    def __init__(self, model, make_cache: Callable | None = None, chunk: int | None = None):
        self.model, self.make_cache, self.chunk = model, make_cache, chunk
        self._cache = None  # one row with the header that was read last
        self._header: tuple[int, ...] = ()
        self._read: tuple[int, ...] = ()  # all tokens of that row

    @torch.inference_mode()
    def log_likelihoods(self, parts: Split, header: int = 0) -> list[Likelihood]:
        """Return the likelihood of every tail.

        The first `header` tokens of the context stay cached for the next prompt that starts with
        them.
        """
        parts = fit(parts, self.model.config.max_positions, self.model.config.bos_id)
        cache, first = self.read(
            parts.context, 0 if parts.trimmed else header, max(map(len, parts.tails))
        )
        self._read = parts.context
        rows = [[float(first[tail[0]])] for tail in parts.tails]
        greedy = [int(first.argmax()) == tail[0] for tail in parts.tails]
        going = [i for i, tail in enumerate(parts.tails) if len(tail) > 1]
        if going:
            cache.select([0] * len(going))
            longest = max(len(parts.tails[i]) for i in going) - 1
            for start in range(0, longest, PIECE):
                # each piece with the token that it predicts last
                pieces = [parts.tails[i][start : start + PIECE + 1] for i in going]
                counts = [max(len(piece) - 1, 0) for piece in pieces]
                T = max(counts)
                padded = [[*piece[:-1], *[0] * (T - count)] for piece, count in zip(pieces, counts)]
                tokens = torch.tensor(padded, device=self.model.device)
                logits = self.model(tokens, self._view(cache), counts)  # [n, T, V]
                for i, piece, count, row in zip(going, pieces, counts, logits):
                    if count:
                        row = row[:count].float().log_softmax(-1)
                        targets = torch.tensor(piece[1:], device=row.device)
                        rows[i] += row.gather(1, targets[:, None])[:, 0].tolist()
                        greedy[i] &= bool((row.argmax(-1) == targets).all())
        if not all(math.isfinite(value) for row in rows for value in row):
            raise NotScorable("The model's log-probabilities contain NaN or infinity.")
        return [Likelihood(math.fsum(row), len(row), row[0], hit) for row, hit in zip(rows, greedy)]

    def write(self, prompt: str | Sequence[int], max_new_tokens: int) -> Completion:
        """Return the greedy completion of a prompt; what `log_likelihoods` just read is reused."""
        ids = self.model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        config = self.model.config
        room = Split(tuple(ids), ((0,) * max_new_tokens,))
        ids = list(fit(room, config.max_positions, config.bos_id).context)
        cache = self.make_cache or "contiguous"
        if self.make_cache is None and self._read and self._read == tuple(ids[: len(self._read)]):
            cache = self._cache
            cache.select([0])
            cache.rewind(len(self._read))
        done = generate(
            self.model, ids, max_new_tokens=max_new_tokens, cache=cache, prefill_chunk=self.chunk
        )
        self._read = ()
        return done

    def read(self, context: Sequence[int], header: int = 0, room: int = 1):
        """Return a cache of one row with the context, and log-probabilities [V] of the next token."""
        keep = self.make_cache is None and header < len(context)
        shared = tuple(context[:header]) if keep else ()
        cache = self._begin(shared, len(context) + room)
        rest = torch.tensor([context[len(shared) :]], device=self.model.device)
        for piece in rest.split(self.chunk or rest.shape[1], 1):
            logits = self.model(piece, self._view(cache), last_only=True)
        return cache, logits[0, -1].float().log_softmax(-1)

    def _begin(self, shared: tuple[int, ...], capacity: int):
        model, config = self.model, self.model.config
        if self.make_cache is not None:
            return self.make_cache(
                config.kv_shape, batch=1, capacity=capacity, dtype=model.dtype, device=model.device
            )
        if self._cache is not None and shared and shared == self._header:
            self._cache.select([0])
            self._cache.rewind(len(shared))
        else:
            self._cache = ContiguousCache(config.kv_shape, 1, None, model.dtype, model.device)
            self._header = shared
            if shared:
                model(torch.tensor([shared], device=model.device), self._cache, last_only=True)
        return self._cache

    def _view(self, cache):
        """Return the cache as the model sees it: in the model's dtype."""
        return cache if self.make_cache is None else in_dtype(cache, self.model.dtype)
