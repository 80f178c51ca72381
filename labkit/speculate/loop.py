"""Guess and verify: a drafter proposes tokens, one target pass judges them all, and what it would have said itself stays.

    draft    d1 .. dn                      cheap, one after another (or looked up)
    verify   one pass over [last, d1 .. dn]  reads the weights once for n + 1 tokens, where decoding reads them n + 1 times
    keep     d1 .. da and one of the target's own   (`generate.verify`: same text greedy, same distribution sampled)
    rewind   the cache to all but the last token, in each row for itself

Any drafter, any cache: a cache says how many tokens one pass may add (`most_at_once`) so that going back is possible and
the answer is that of single steps; where that is 1, this is plain decoding. Pays where a token is cheaper to check than to
make: decode is bound by reading weights. Loses where drafts fail or cost much, and at batches where arithmetic is the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch

from labkit.cache import KVCache, WindowedCache
from labkit.errors import BadRequest, whole_number
from labkit.generate.completion import Token
from labkit.generate.loop import GREEDY, choose, forward, make_cache, prefill
from labkit.generate.request import Request, Row, prepare, wants_tokens
from labkit.generate.sampling import Sampling
from labkit.generate.verify import InvalidDraft, verify_greedy, verify_row
from labkit.measure import clock
from labkit.speculate.draft import NOTHING, Draft, Drafter
from labkit.speculate.report import Speculated, Tally

AUTO_LENGTH = 12  # the longest draft where the length adapts


class DrafterFailed(RuntimeError):
    """A drafter raised; the target is untouched and a given cache holds what it held before the call."""


def generate(
    model,
    prompts: str | Sequence,
    *,
    drafter: str | Drafter,
    draft_length: int | str = 4,
    max_new_tokens: int | Sequence[int] = 128,
    sampling: Sampling = GREEDY,
    end_ids: int | Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    cache: str | KVCache | Callable[..., KVCache] = "contiguous",
    on_token: Callable[[Token], object] | None = None,
    cancel=None,
    prefill_chunk: int | None = None,
) -> Speculated | list[Speculated]:
    """As `labkit.generate.generate`, with `drafter`: a `Drafter`, or a name of `labkit.speculate.DRAFTERS` or of a number
    format (the target itself in it). `draft_length`: tokens drafted a pass, 0 is plain decoding; "auto" adapts it."""
    request = prepare(model, prompts, max_new_tokens=max_new_tokens, sampling=sampling, end_ids=end_ids, stop=stop,
                      cache=cache, cancel=cancel, prefill_chunk=prefill_chunk, texts=wants_tokens(on_token))
    drafter, longest = _drafter(drafter, draft_length, model)
    tallies = [Tally() for _ in request.rows]
    for token in decode(request, drafter, longest, tallies):
        if on_token is not None:
            on_token(token)
    done = [Speculated(**vars(row.completion(model)), tally=tally, drafter=drafter.name)
            for row, tally in zip(request.rows, tallies)]  # fmt: skip
    return done[0] if request.single else done


def _drafter(drafter: str | Drafter, draft_length: int | str, model) -> tuple[Drafter, int]:
    from labkit.speculate import make_drafter

    if draft_length != "auto" and whole_number(draft_length, "draft_length") < 0:
        raise BadRequest(f'draft_length is {draft_length}; give a whole number from 0 (plain decoding) up, or "auto".')
    if isinstance(drafter, str):
        drafter = make_drafter(drafter, model)
    if not isinstance(drafter, Drafter):
        raise BadRequest(f"drafter is {drafter!r}; give a Drafter, or the name of one.")
    drafter.check(model)
    return (drafter.adaptive(), AUTO_LENGTH) if draft_length == "auto" else (drafter, draft_length)


def decode(request: Request, drafter: Drafter, longest: int, tallies: Sequence[Tally]) -> Iterator[Token]:
    """The loop with a cache that is whole again after whatever happened; yields every token of every row."""
    given = isinstance(request.cache, KVCache)
    before = request.cache.lengths if given else None
    try:
        yield from _decode(request, drafter, longest, tallies)
    except Exception:
        if given:
            with suppress(BadRequest):  # a cache that cannot go back so far stays as it is; the first error matters
                request.cache.rewind(before)
        raise


def _decode(request: Request, drafter: Drafter, longest: int, tallies: Sequence[Tally]) -> Iterator[Token]:
    model, given = request.model, isinstance(request.cache, KVCache)
    batch = [row for row in request.rows if given or row.reason is None]
    if all(row.reason is not None for row in batch):
        return
    if request.cancelled():
        yield from (row.cancel() for row in batch if row.reason is None)
        return
    clock.synchronize(model.device)
    start = clock.now()
    cache = _cache(request, batch, longest)
    states = [] if drafter.wants_hidden else None
    logits = prefill(request, batch, cache, states)
    if logits is None:  # cancelled
        yield from (row.cancel() for row in batch if row.reason is None)
        return
    live = [i for i, row in enumerate(batch) if row.reason is None]
    chosen, time_s = choose(logits[live], [batch[i] for i in live], request), clock.now() - start
    yield from [batch[i].take(token, time_s, request.end_ids) for i, token in zip(live, chosen)]

    live = [i for i in live if batch[i].reason is None]
    if live:
        with _blamed(drafter), torch.inference_mode():
            drafter.share(cache if not given or len(batch) == 1 else None)  # a given one keeps rows that have ended
            drafter.begin(request, [batch[i] for i in live], None if states is None else [states[i] for i in live])
    while live and not request.cancelled():
        if not given and len(live) < len(batch):
            if cache is not None:
                cache.select(live)
            batch = [batch[i] for i in live]
            live = list(range(len(batch)))
        rows = [batch[i] for i in live]
        began = clock.now()
        drafts = _propose(request, drafter, rows, _limits(rows, live, cache, longest))
        drafted = clock.now()
        verdicts, states = _verify(request, cache, batch, live, drafts, drafter.wants_hidden)
        verified = clock.now()
        tokens, accepted = [], []
        for row, draft, (said, kept) in zip(rows, drafts, verdicts):
            emitted = 0
            while emitted < len(said) and row.reason is None:
                tokens.append(row.take(said[emitted], verified - start, request.end_ids))
                emitted += 1
            accepted.append(tallies[row.index].add(len(draft.tokens), kept, emitted))
        if cache is not None:
            cache.rewind([len(row.history) - 1 for row in batch])
        settled = clock.now()
        stay = [place for place, row in enumerate(rows) if row.reason is None]
        with _blamed(drafter), torch.inference_mode():
            if stay:
                drafter.observe(accepted, states and [s[: kept + 1] for s, kept in zip(states, accepted)])
                if len(stay) < len(rows):
                    drafter.select(stay)
        observed = clock.now()
        for row in rows:
            tally = tallies[row.index]
            tally.draft_steps += max(len(draft.tokens) for draft in drafts)
            tally.draft_s += drafted - began + observed - settled
            tally.verify_s += verified - drafted
            tally.overhead_s += settled - verified
        live = [live[place] for place in stay]
        yield from tokens  # last, so that whoever stops reading leaves everything in order
    yield from (row.cancel() for row in batch if row.reason is None)


def _cache(request: Request, batch: list[Row], longest: int) -> KVCache | None:
    if request.cache is WindowedCache:  # one that can go back
        return make_cache(request, batch, partial(WindowedCache, slack=longest))
    return make_cache(request, batch) if callable(request.cache) else request.cache


def _limits(rows: list[Row], live: list[int], cache: KVCache | None, longest: int) -> list[int]:
    """Most drafted tokens a row: the pass itself gives one more, and the budget is exact."""
    limits = [min(longest, row.budget - len(row.tokens) - 1) for row in rows]
    if cache is not None:
        most = cache.most_at_once()
        limits = [limit if most[i] is None else min(limit, max(most[i] - 1, 0)) for i, limit in zip(live, limits)]
    return limits


def _propose(request: Request, drafter: Drafter, rows: list[Row], limits: list[int]) -> list[Draft]:
    if not any(limits):
        return [NOTHING] * len(rows)
    with _blamed(drafter), torch.inference_mode():
        drafts = drafter.propose(rows, limits)
    V = request.model.config.vocab_size
    for draft, limit in zip(drafts, limits, strict=True):
        tokens, q = draft.tokens, draft.probabilities
        if len(tokens) > limit or (len(tokens) and not 0 <= min(tokens) <= max(tokens) < V):
            raise InvalidDraft(f"Drafter {drafter.name} proposed {list(tokens)}: at most {limit} ids from 0 to {V - 1} were asked for.")
        if q is not None and tuple(q.shape) != (len(tokens), V):
            raise InvalidDraft(f"Drafter {drafter.name} gave probabilities {list(q.shape)} for {len(tokens)} tokens of {V} ids.")
    return drafts


@torch.inference_mode()
def _verify(request: Request, cache, batch: list[Row], live: list[int], drafts: list[Draft], hidden: bool):
    """Each live row's verdict, and its hidden states from its last token on (None unless wanted)."""
    pieces: list[Sequence[int]] = [()] * len(batch)
    for i, draft in zip(live, drafts):
        pieces[i] = [*(batch[i].history if cache is None else batch[i].history[-1:]), *draft.tokens]
    out = forward(request.model, cache, pieces, last_only=False, return_hidden=hidden)
    logits, states = out if hidden else (out, None)
    ends = [slice(len(pieces[i]) - len(draft.tokens) - 1, len(pieces[i])) for i, draft in zip(live, drafts)]
    if hidden:
        states = [states[i, end] for i, end in zip(live, ends)]
    if not request.sampling.plain_greedy:
        verdicts = [verify_row(logits[i, end], draft.tokens, draft.probabilities, batch[i], request.sampling, request.end_ids)
                    for i, end, draft in zip(live, ends, drafts)]  # fmt: skip
    elif cache is None:
        verdicts = [verify_greedy(logits[i : i + 1, end], [draft.tokens])[0] for i, end, draft in zip(live, ends, drafts)]
    else:
        verdicts = verify_greedy(logits if len(live) == len(batch) else logits[live], [draft.tokens for draft in drafts])
    return verdicts, states


@contextmanager
def _blamed(drafter: Drafter):
    """What a drafter raises, with its name."""
    try:
        yield
    except BadRequest:
        raise
    except Exception as error:
        raise DrafterFailed(f"Drafter {drafter.name} failed ({type(error).__name__}: {error}); the target and its cache are as "
                            "before: decode plainly or use another drafter.") from error  # fmt: skip
