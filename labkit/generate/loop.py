"""Plain decoding: one prefill, then one token per step.

The lab compares every other way of decoding with this one.

    prefill   the whole prompt (or chunks of it) -> logits of its last token -> token 1      (TTFT)
    decode    token i -> logits -> token i + 1, until an end token, stop string or budget (TPOT)

Prompts of unequal length are padded on the right. Each row gives the same tokens as it
gives alone. A row that has ended leaves the batch, so the others do not pay for it.
Cost per token: one forward pass, and a few microseconds for the loop. With greedy
decoding, the loop does one argmax and one transfer. Each token is on the CPU before the
next step starts, so the clock needs no other synchronization.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from labkit.cache import KVCache
from labkit.errors import BadRequest
from labkit.generate.request import Request
from labkit.generate.row import Row, Token, Tokens
from labkit.generate.sampling import greedy, sample
from labkit.kernels.device import synchronize


def decode(request: Request) -> Tokens:
    """Yield each token of each row as soon as it is known."""
    batch = Batch(request)
    yield from batch.begin()
    while batch.next_rows():
        pieces = [row.new_tokens(batch.cache is not None) for row in batch.rows]
        logits = forward(request.model, batch.cache, pieces)[:, 0]
        yield from batch.choose(logits)
    yield from batch.cancel()


class Batch:
    """Rows that run together over one cache.

    A row that has ended leaves the batch. If the cache was given by the caller, the row
    stays in it and reads no more tokens. `slack` is the number of tokens that the cache
    must be able to rewind.
    """

    def __init__(self, request: Request, slack: int = 0):
        self.request, self.slack, self.start = request, slack, 0.0
        self.cache = request.cache if isinstance(request.cache, KVCache) else None
        self.given = self.cache is not None
        self.rows = [row for row in request.rows if self.given or row.reason is None]

    def live(self) -> list[int]:
        """Return the indices of the rows that have not ended."""
        return [i for i, row in enumerate(self.rows) if row.reason is None]

    def next_rows(self) -> list[Row]:
        """Return the rows of the next pass; none if all have ended or the request is cancelled.

        Rows that have ended leave the batch, unless the cache was given.
        """
        live = self.live()
        if not live or self.request.cancelled():
            return []
        rows = [self.rows[i] for i in live]
        if not self.given and len(rows) < len(self.rows):
            if self.cache is not None:
                self.cache.select(live)
            self.rows = rows
        return rows

    def begin(self, states: list[Tensor] | None = None) -> list[Token]:
        """Make the cache, read the prompts and return each row's first token.

        See `prefill` for `states`.
        """
        if not self.live() or self.request.cancelled():
            return self.cancel()
        model, maker = self.request.model, self.request.cache
        synchronize(model.device)
        self.start = perf_counter()
        if maker is not None and not isinstance(maker, KVCache):
            capacity = max(len(row.prompt) + row.budget - 1 for row in self.rows)
            options = {"capacity": capacity, "dtype": model.dtype, "device": model.device}
            self.cache = maker(model.config.kv_shape, batch=len(self.rows), **options)
            self.cache.allow_rewind(self.slack)
        logits = self.prefill(states)
        return self.cancel() if logits is None else self.choose(logits)

    def prefill(self, states: list[Tensor] | None = None) -> Tensor | None:
        """Run the prompt tokens that are not cached; return logits [B, V] after each prompt.

        Returns None if the request was cancelled. `states` receives one tensor per row:
        the hidden states [T, E] of the tokens that were run.
        """
        cached = [0] * len(self.rows)
        if self.cache is not None:
            # If the whole prompt is cached, its last token runs again and gives the logits.
            cached = [
                length - (length == len(row.prompt) and row.reason is None)
                for length, row in zip(self.cache.lengths, self.rows)
            ]
            self.cache.rewind(cached)
        pieces = [row.prompt[n:] if row.reason is None else () for n, row in zip(cached, self.rows)]
        longest = max(map(len, pieces))
        chunk, logits, hidden = self.request.options.prefill_chunk or longest, None, []
        for first in range(0, longest, chunk):
            if first and self.request.cancelled():
                return None
            parts = [piece[first : first + chunk] for piece in pieces]
            new = forward(self.request.model, self.cache, parts, return_hidden=states is not None)
            if states is not None:
                new, own = new
                hidden.append([state[: len(part)] for state, part in zip(own, parts)])
            # A row keeps the logits of the chunk in which its prompt ended.
            running = torch.tensor([len(part) > 0 for part in parts], device=new.device)
            new = new[:, 0]
            logits = new if logits is None else torch.where(running[:, None], new, logits)
        if states is not None:
            states.extend(map(torch.cat, zip(*hidden)))
        return logits

    @torch.inference_mode()
    def choose(self, logits: Tensor) -> list[Token]:
        """Choose a token for each live row from logits [B, V], and add it."""
        live, sampling, ends = self.live(), self.request.sampling, self.request.end_ids
        rows = [self.rows[i] for i in live]
        logits = logits if len(live) == len(self.rows) else logits[live]
        if sampling.plain_greedy:
            ids = greedy(logits)
        else:
            ids = [
                sample(scores, sampling, row.past(ends), row.generator)
                for scores, row in zip(logits, rows)
            ]
        return [token for (token,) in self.take(rows, [[id] for id in ids])]

    def take(self, rows: Sequence[Row], new: Sequence[Sequence[int]]) -> list[list[Token]]:
        """Add each row's new tokens, up to the one that ends it."""
        time_s, ends = perf_counter() - self.start, self.request.end_ids
        return [
            [row.take(id, time_s, ends) for id in ids if row.reason is None]
            for row, ids in zip(rows, new)
        ]

    def cancel(self) -> list[Token]:
        """End all rows that have not ended; return their closing tokens."""
        return [self.rows[i].cancel() for i in self.live()]


@torch.inference_mode()
def forward(model: Any, cache: KVCache | None, pieces: Sequence[Sequence[int]], **options) -> Any:
    """Run one pass over each row's new tokens; return logits [B, 1, V] after the last of each.

    `options` are those of the model: with `last_only=False`, every token has logits;
    with `return_hidden`, the hidden states are returned, too. If the pass fails, the
    cache is as before.
    """
    counts = [len(piece) for piece in pieces]
    width = max(counts)
    ragged = min(counts) < width
    if ragged:  # the padding is dropped by `counts`
        pieces = [(*piece, *(0,) * (width - len(piece))) for piece in pieces]
    tokens = torch.tensor(pieces, device=model.device)  # [B, T]
    with rewound_on_error(cache):
        return model(tokens, cache, counts if ragged else None, **{"last_only": True, **options})


@contextmanager
def rewound_on_error(cache: KVCache | None) -> Iterator[None]:
    """Rewind a cache to its old lengths if the code inside raises an error.

    A cache that cannot be rewound that far is left unchanged, and the original error is
    raised.
    """
    before = 0 if cache is None else cache.lengths
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException:
        if cache is not None:
            with suppress(BadRequest):
                cache.rewind(before)
        raise
