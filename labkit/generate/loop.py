"""Plain decoding: one prefill, then one token a step. The baseline of every ratio in the lab.

    prefill   the whole prompt (or chunks of it) -> logits of its last token -> token 1      (TTFT)
    decode    token i -> logits -> token i + 1, until an end token, a stop string or the budget  (TPOT)

Rows of unequal prompts are padded on the right, and each gives the tokens that it gives alone; a row that has
ended leaves the batch, so the others do not pay for it. Cost per token: one forward pass; around it, this loop
adds a few microseconds (greedy: one argmax and one transfer). A token is known on the CPU before the next
step starts, so the clock needs no further synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import perf_counter

import torch
from torch import Tensor

from labkit.cache import KVCache
from labkit.errors import BadRequest
from labkit.generate.completion import Completion, Token
from labkit.generate.request import Request, Row, prepare, wants_tokens
from labkit.generate.sampling import Sampling, greedy, sample
from labkit.measure.clock import synchronize

GREEDY = Sampling()


def generate(
    model,
    prompts: str | Sequence,
    *,
    max_new_tokens: int | Sequence[int] = 128,
    sampling: Sampling = GREEDY,
    end_ids: int | Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    cache: str | KVCache | Callable[..., KVCache] = "contiguous",
    on_token: Callable[[Token], object] | None = None,
    cancel=None,
    prefill_chunk: int | None = None,
) -> Completion | list[Completion]:
    """Continue one prompt (text or token ids) or a list of them; a list in gives a list out.

    `end_ids`: None is the model's own, () is none. `stop`: texts that end a row and are cut off. `cancel`: an
    Event or a function, asked before each forward pass. `on_token` is called with each `Token`.
    `cache`: a name of `labkit.cache.CACHES`, a function that makes one, or a cache object, which may hold the
    beginning of each prompt and afterwards holds all but the last token. Raises BadRequest before any work.
    """
    request = prepare(model, prompts, max_new_tokens=max_new_tokens, sampling=sampling, end_ids=end_ids, stop=stop,
                      cache=cache, cancel=cancel, prefill_chunk=prefill_chunk, texts=wants_tokens(on_token))
    for token in decode(request):
        if on_token is not None:
            on_token(token)
    completions = [row.completion(model) for row in request.rows]
    return completions[0] if request.single else completions


def stream(model, prompt: str | Sequence, *, max_new_tokens: int = 128, sampling: Sampling = GREEDY, end_ids=None,
           stop: str | Sequence[str] = (), cache="contiguous", cancel=None, prefill_chunk=None) -> Iterator[Token]:
    """The same, token by token; the texts together are the completion's text. Checks are made at the call."""
    return decode(prepare(model, prompt, max_new_tokens=max_new_tokens, sampling=sampling, end_ids=end_ids, stop=stop,
                          cache=cache, cancel=cancel, prefill_chunk=prefill_chunk, texts=True))


def decode(request: Request) -> Iterator[Token]:
    """The loop itself: yields every token of every row as it is known."""
    model, end_ids, given = request.model, request.end_ids, isinstance(request.cache, KVCache)
    # A given cache keeps its rows, so that its owner finds them again; finished rows then feed no token.
    batch = [row for row in request.rows if given or row.reason is None]
    if all(row.reason is not None for row in batch):
        return
    if request.cancelled():
        yield from (row.cancel() for row in batch if row.reason is None)
        return
    synchronize(model.device)
    start = perf_counter()
    cache = make_cache(request, batch) if callable(request.cache) else request.cache
    logits = prefill(request, batch, cache)
    while logits is not None:
        live = [i for i, row in enumerate(batch) if row.reason is None]
        if len(live) < len(batch):
            logits = logits[live]
        chosen = choose(logits, [batch[i] for i in live], request)
        time_s = perf_counter() - start
        for i, token in zip(live, chosen):
            yield batch[i].take(token, time_s, end_ids)

        staying = [i for i in live if batch[i].reason is None]
        if not staying:
            return
        if request.cancelled():
            break
        if not given and len(staying) < len(batch):
            if cache is not None:
                cache.select(staying)
            batch = [batch[i] for i in staying]
        logits = forward(model, cache, [_next_piece(row, cache) for row in batch])[:, 0]
    yield from (row.cancel() for row in batch if row.reason is None)


def make_cache(request: Request, batch: list[Row], maker: Callable[..., KVCache] | None = None) -> KVCache:
    """A cache that just holds what the rows may come to; of `maker`, else of the request's."""
    model, capacity = request.model, max(len(row.prompt) + row.budget - 1 for row in batch)
    return (maker or request.cache)(model.config.kv_shape, batch=len(batch), capacity=capacity, dtype=model.dtype,
                                    device=model.device)


def prefill(request: Request, batch: list[Row], cache: KVCache | None, keep: list | None = None) -> Tensor | None:
    """Logits [B, V] after each prompt, from the tokens that the cache does not hold yet; None: cancelled.

    `keep`: a list that receives, for each row, the hidden states [T, E] of the tokens that were run."""
    held = [0] * len(batch)
    if cache is not None:
        # A prompt that is held entirely leaves nothing to compute, so its last token is run again.
        held = [n - (n == len(row.prompt) and row.reason is None) for n, row in zip(cache.lengths, batch)]
        cache.rewind(held)
    pieces = [row.prompt[n:] if row.reason is None else () for n, row in zip(held, batch)]
    longest = max(map(len, pieces))
    chunk, logits, states = request.prefill_chunk or longest, None, []
    for first in range(0, longest, chunk):
        if first and request.cancelled():
            return None
        parts = [piece[first : first + chunk] for piece in pieces]
        new = forward(request.model, cache, parts, return_hidden=keep is not None)
        if keep is not None:
            new, hidden = new
            states.append([states_of[: len(part)] for states_of, part in zip(hidden, parts)])
        new = new[:, 0]
        if logits is None:
            logits = new
        else:  # a row keeps the logits of the chunk in which its prompt ended
            running = torch.tensor([len(part) > 0 for part in parts], device=new.device)
            logits = torch.where(running[:, None], new, logits)
    if keep is not None:
        keep.extend(map(torch.cat, zip(*states)))
    return logits


def _next_piece(row: Row, cache: KVCache | None) -> Sequence[int]:
    if row.reason is not None:
        return ()
    return row.history if cache is None else row.history[-1:]


@torch.inference_mode()
def forward(model, cache: KVCache | None, pieces: list[Sequence[int]], **options):
    """One pass over each row's new tokens -> logits [B, 1, V] after the last; on failure the cache is as before.

    `options` are the model's: `last_only=False` gives every token's logits, `return_hidden` the states as well."""
    counts = [len(piece) for piece in pieces]
    width = max(counts)
    if min(counts) == width:
        counts = None
    else:
        pieces = [(*piece, *(0,) * (width - len(piece))) for piece in pieces]  # padding, dropped by `counts`
    tokens = torch.tensor(pieces, device=model.device)  # [B, T]
    before = None if cache is None else cache.lengths
    try:
        return model(tokens, cache, counts, **{"last_only": True, **options})
    except BaseException:
        if cache is not None:
            with suppress(BadRequest):  # a cache that cannot go back stays as it is; the first error matters
                cache.rewind(before)
        raise


@torch.inference_mode()
def choose(logits: Tensor, rows: list[Row], request: Request) -> list[int]:
    """The next token of each row from its logits [B, V]."""
    if request.sampling.plain_greedy:
        return greedy(logits)
    ends = request.end_ids
    return [
        sample(scores, request.sampling, row.history, len(row.prompt), ends, row.generator)
        for scores, row in zip(logits, rows)
    ]
