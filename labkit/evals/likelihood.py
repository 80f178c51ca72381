"""How likely a model finds given answers behind one prompt: the measurement under every task without generation.

    log p(answer | prompt) = sum over the answer's tokens of log p(token | prompt, tokens before)      nats

Which tokens are the answer's: the whole string is tokenised, because "A" and " A" are other tokens and a tokenizer may merge
over the border. The answer's tokens are the tail behind what all the strings and the prompt alone have in common, so all
answers are scored from one place. A prompt that ends in a chat template is token ids, and stays as it is.
Cost: the prompt is read once into a cache, whose row is then repeated for the answers. A header that many prompts share is
read once for all. Always in the same pieces, so that no bit depends on what was read before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from labkit.cache import ContiguousCache
from labkit.cache.in_dtype import in_dtype
from labkit.cache.prefix_entry import common
from labkit.errors import BadRequest
from labkit.generate import Completion, generate

PIECE = 128  # tokens of an answer whose distributions over the vocabulary are held at once


class NotScorable(BadRequest):
    """An item without an answer: scores that are NaN or all equal, or a prompt that does not fit. Counted, never a zero."""


@dataclass(frozen=True)
class Likelihood:
    """Of one answer. `first`: its first token's log-probability; `greedy`: greedy decoding would write it."""

    nats: float
    tokens: int
    first: float
    greedy: bool


@dataclass(frozen=True)
class Split:
    """`context` that all answers share, and each answer's `tails`; `trimmed` tokens were cut off the context's left."""

    context: tuple[int, ...]
    tails: tuple[tuple[int, ...], ...]
    trimmed: int = 0


def split(tokenizer, prompt: str | Sequence[int], answers: Sequence[str]) -> Split:
    """Token ids of a prompt and the answers behind it; the prompt is text, or ids that end where the answer begins."""
    if not answers or not all(answers):
        raise BadRequest(f"{len(answers)} answers, of which {sum(not a for a in answers)} are empty; give at least one, all with text.")
    if isinstance(prompt, str):
        wholes = [tokenizer.encode(prompt + answer) for answer in answers]
        start = min(common(tokenizer.encode(prompt), whole) for whole in wholes)
    else:
        wholes = [[*prompt, *continuation_ids(tokenizer, answer)] for answer in answers]
        start = len(prompt)
    if start == 0:
        raise BadRequest("A prompt without a token of its own gives its answer's first token nothing to follow; give some text.")
    return Split(tuple(wholes[0][:start]), tuple(tuple(whole[start:]) for whole in wholes))


def continuation_ids(tokenizer, text: str) -> list[int]:
    """A text's ids as they follow a line break: without a BOS, and without the space that some tokenizers put in front."""
    before, whole = (tokenizer.encode(piece, add_bos=False, special=False) for piece in ("\n", "\n" + text))
    if whole[: len(before)] == before:
        return whole[len(before) :]
    return tokenizer.encode(text, add_bos=False, special=False)  # it begins with what merges with a line break


def fit(parts: Split, limit: int, bos_id: int | None = None) -> Split:
    """At most `limit` tokens of input (the last scored token is none): the context loses its left, never its BOS, never an
    answer. Refused where nothing of the context would be left."""
    longest = max(map(len, parts.tails)) - 1
    excess = len(parts.context) + longest - limit
    if excess <= 0:
        return parts
    kept = parts.context[:1] if parts.context[0] == bos_id else ()
    rest = parts.context[len(kept) :]
    if excess >= len(rest):
        raise NotScorable(f"An answer of {longest + 1} tokens leaves no room for its prompt in a context of {limit}.")
    return Split((*kept, *rest[excess:]), parts.tails, excess)


class Reader:
    """Reads prompts with one model. `make_cache` and `chunk`: through another cache, in chunks (a quantised KV cache)."""

    def __init__(self, model, make_cache: Callable | None = None, chunk: int | None = None):
        self.model, self.make_cache, self.chunk = model, make_cache, chunk
        self._cache, self._header = None, ()  # one row that holds the header read last
        self._read: tuple[int, ...] = ()  # what that row was read up to

    @torch.inference_mode()
    def log_likelihoods(self, parts: Split, header: int = 0) -> list[Likelihood]:
        """Of every tail. The first `header` tokens of the context are kept for the next prompt that begins with them."""
        parts = fit(parts, self.model.config.context, self.model.config.bos_id)
        cache, first = self.read(parts.context, 0 if parts.trimmed else header, max(map(len, parts.tails)))
        self._read = parts.context
        rows = [[float(first[tail[0]])] for tail in parts.tails]
        greedy = [int(first.argmax()) == tail[0] for tail in parts.tails]
        going = [i for i, tail in enumerate(parts.tails) if len(tail) > 1]
        if going:
            cache.select([0] * len(going))
            longest = max(len(parts.tails[i]) for i in going) - 1
            for start in range(0, longest, PIECE):
                pieces = [parts.tails[i][start : start + PIECE + 1] for i in going]  # each with the token it predicts last
                counts = [max(len(piece) - 1, 0) for piece in pieces]
                T = max(counts)
                tokens = [[*piece[:-1], *[0] * (T - count)] for piece, count in zip(pieces, counts)]
                logits = self.model(torch.tensor(tokens, device=self.model.device), self._view(cache), counts)  # [n, T, V]
                for i, piece, count, found in zip(going, pieces, counts, logits):
                    if count:
                        found = found[:count].float().log_softmax(-1)
                        targets = torch.tensor(piece[1:], device=found.device)
                        rows[i] += found.gather(1, targets[:, None])[:, 0].tolist()
                        greedy[i] &= bool((found.argmax(-1) == targets).all())
        if not all(math.isfinite(value) for row in rows for value in row):
            raise NotScorable("The model's log-probabilities hold NaN or infinity.")
        return [Likelihood(math.fsum(row), len(row), row[0], hit) for row, hit in zip(rows, greedy)]

    def write(self, prompt: str | Sequence[int], max_new_tokens: int) -> Completion:
        """What greedy decoding writes behind a prompt; what `log_likelihoods` has just read of it is not read again."""
        ids = self.model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        config = self.model.config
        ids = list(fit(Split(tuple(ids), ((0,) * max_new_tokens,)), config.context, config.bos_id).context)
        cache = self.make_cache or "contiguous"
        if self.make_cache is None and self._read and self._read == tuple(ids[: len(self._read)]):
            cache = self._cache
            cache.select([0])
            cache.rewind(len(self._read))
        done = generate(self.model, ids, max_new_tokens=max_new_tokens, cache=cache, prefill_chunk=self.chunk)
        self._read = ()
        return done

    def read(self, context: Sequence[int], header: int = 0, room: int = 1):
        """(a cache of one row that holds the context, log-probabilities [V] of what follows it)."""
        shared = tuple(context[:header]) if self.make_cache is None and header < len(context) else ()
        cache, held = self._begin(shared, len(context) + room), len(shared)
        rest = torch.tensor([context[held:]], device=self.model.device)
        for piece in rest.split(self.chunk or rest.shape[1], 1):
            logits = self.model(piece, self._view(cache), last_only=True)
        return cache, logits[0, -1].float().log_softmax(-1)

    def _begin(self, shared: tuple[int, ...], capacity: int):
        model, config = self.model, self.model.config
        if self.make_cache is not None:
            return self.make_cache(config.kv_shape, batch=1, capacity=capacity, dtype=model.dtype, device=model.device)
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
        """As the model computes: a cache of packed numbers gives and takes the model's dtype."""
        return cache if self.make_cache is None else in_dtype(cache, self.model.dtype)
