"""Speculative decoding: a drafter proposes tokens, one target pass judges them all.

    draft    d1 .. dn                        cheap, one after another (or looked up)
    verify   one pass over [last, d1 .. dn]  reads the weights once for n + 1 tokens
    keep     d1 .. da and one of the target's own   (`verify`: same text greedy, same distribution)
    rewind   the cache to all but the last token, in each row for itself

It works with any drafter and any cache: a cache says how many tokens one pass may add
(`most_at_once`) so that it can go back and the answer is that of single steps; if that
is 1, this is plain decoding. It pays if a token is cheaper to check than to make:
decoding is bound by reading weights. It loses if drafts fail or cost much, and at
batches where arithmetic is the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter as now
from typing import Any

import torch
from torch import Tensor

from labkit.errors import BadRequest
from labkit.generate.drafter import NOTHING, Draft, Drafter
from labkit.generate.loop import Batch, forward, rewound_on_error
from labkit.generate.request import Request
from labkit.generate.row import Row, Tally, Token, Tokens
from labkit.generate.verify import InvalidDraft, Verdict, verify_greedy, verify_row


class DrafterFailed(RuntimeError):
    """A drafter raised an error.

    The target and a given cache are as before the call.
    """


def speculate(request: Request, drafter: Drafter, longest: int, watch: Watch) -> Tokens:
    """Yield every token of every row, as many per target pass as the target accepts."""
    batch = Batch(request, slack=longest)
    states: list[Tensor] | None = [] if drafter.wants_hidden else None
    with rewound_on_error(batch.cache):
        yield from batch.begin(states)
        begin(drafter, batch, states)
        while batch.live() and not request.cancelled():
            batch.drop_finished()
            rows = [batch.rows[i] for i in batch.live()]
            with watch("draft_s"):
                drafts = propose(drafter, batch, rows, longest)
            with watch("verify_s"):
                verdicts, states = verify(batch, drafts, drafter.wants_hidden)
            with watch("overhead_s"):
                tokens = batch.take(rows, [new for new, _ in verdicts])
                accepted = [min(kept, len(taken)) for taken, (_, kept) in zip(tokens, verdicts)]
                if batch.cache is not None:
                    batch.cache.rewind([len(row.history) - 1 for row in batch.rows])
            with watch("draft_s"):
                observe(drafter, rows, accepted, states)
            watch.count(rows, drafts, tokens, accepted)
            for taken in tokens:  # last: whoever stops reading here leaves everything in order
                yield from taken
        yield from batch.cancel()


def begin(drafter: Drafter, batch: Batch, states: Sequence[Tensor] | None) -> None:
    """Hand the target's cache and the rows that go on to the drafter."""
    live = batch.live()
    if live:
        with blamed(drafter):
            # A given cache keeps rows that have ended, and a drafter knows only live ones.
            drafter.share(None if batch.given and len(batch.rows) > 1 else batch.cache)
            hidden = None if states is None else [states[i] for i in live]
            drafter.begin(batch.request, [batch.rows[i] for i in live], hidden)


def propose(drafter: Drafter, batch: Batch, rows: Sequence[Row], longest: int) -> list[Draft]:
    """Return a draft per live row, no longer than its budget and its cache allow."""
    # A pass gives one token more than was drafted, and the budget is exact.
    limits = [min(longest, row.budget - len(row.tokens) - 1) for row in rows]
    if batch.cache is not None:
        most = batch.cache.most_at_once()
        sizes = [most[i] for i in batch.live()]
        limits = [n if size is None else min(n, max(size - 1, 0)) for n, size in zip(limits, sizes)]
    if not any(limits):
        return [NOTHING] * len(rows)
    with blamed(drafter):
        drafts = drafter.propose(rows, limits)
    V = batch.request.model.config.vocab_size
    for draft, limit in zip(drafts, limits, strict=True):
        if not isinstance(draft, Draft):
            raise InvalidDraft(f"The drafter {drafter.name} proposed {draft!r}; give a Draft.")
        tokens, q = draft.tokens, draft.probabilities
        asked_for = len(tokens) <= limit and all(0 <= token < V for token in tokens)
        if not asked_for or (q is not None and tuple(q.shape) != (len(tokens), V)):
            raise InvalidDraft(
                f"The drafter {drafter.name} proposed {list(tokens)}; give at most {limit} ids from 0 "
                f"to {V - 1}, and with probabilities one row of {V} per token."
            )
    return drafts


@torch.inference_mode()
def verify(
    batch: Batch, drafts: Sequence[Draft], wants_hidden: bool
) -> tuple[list[Verdict], list[Tensor] | None]:
    """Judge the drafts in one pass.

    Also return hidden states from each row's last token on.
    """
    request, cached, live = batch.request, batch.cache is not None, batch.live()
    pieces: list[Sequence[int]] = [()] * len(batch.rows)
    for i, draft in zip(live, drafts):
        pieces[i] = [*batch.rows[i].new_tokens(cached), *draft.tokens]
    options = {"last_only": False, "return_hidden": wants_hidden}
    out = forward(request.model, batch.cache, pieces, **options)
    logits, states = out if wants_hidden else (out, None)
    # Each row's logits from its last token on; with a cache, that is all of them.
    spans = [
        slice(len(pieces[i]) - len(draft.tokens) - 1, len(pieces[i]))
        for i, draft in zip(live, drafts)
    ]
    if request.sampling.plain_greedy and cached:
        verdicts = verify_greedy(logits if len(live) == len(batch.rows) else logits[live], drafts)
    else:
        verdicts = [
            verify_row(logits[i, span], draft, batch.rows[i], request.sampling, request.end_ids)
            for i, span, draft in zip(live, spans, drafts)
        ]
    return verdicts, None if states is None else [states[i, span] for i, span in zip(live, spans)]


def observe(
    drafter: Drafter, rows: Sequence[Row], accepted: Sequence[int], states: list[Tensor] | None
) -> None:
    """Tell the drafter what was kept, and which rows go on."""
    stay = [place for place, row in enumerate(rows) if row.reason is None]
    if stay:
        hidden = states and [own[: kept + 1] for own, kept in zip(states, accepted)]
        with blamed(drafter):
            drafter.observe(accepted, hidden)
            if len(stay) < len(rows):
                drafter.select(stay)


@contextmanager
def blamed(drafter: Drafter) -> Iterator[None]:
    """Re-raise a drafter's exception as DrafterFailed, with the drafter's name."""
    try:
        with torch.inference_mode():
            yield
    except BadRequest:
        raise
    except Exception as error:
        raise DrafterFailed(
            f"The drafter {drafter.name} failed ({type(error).__name__}: {error}); the target and "
            "its cache are as before: decode without a drafter or use another one."
        ) from error


class Watch:
    """Time the phases of each pass and count what drafting did, per row.

    `with watch("draft_s"):` adds the seconds inside to that phase of the current pass,
    and `count` ends the pass. The loop reads nothing of it.
    """

    def __init__(self, rows: int):
        self.tallies = [Tally() for _ in range(rows)]
        self.seconds: dict[str, Any] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = now()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now() - began

    def count(
        self,
        rows: Sequence[Row],
        drafts: Sequence[Draft],
        tokens: Sequence[Sequence[Token]],
        accepted: Sequence[int],
    ) -> None:
        """Add one pass to the tally of each of its rows."""
        steps = max(len(draft.tokens) for draft in drafts)
        for row, draft, taken, kept in zip(rows, drafts, tokens, accepted):
            drafted = len(draft.tokens)
            # A row that ended with a drafted token did not see the target reject the next one.
            examined = kept + (len(taken) > kept and kept < drafted)
            counts = (drafted, examined, kept, 1, steps)
            self.tallies[row.index] += Tally(*counts, **self.seconds, passes=[(drafted, kept)])
        self.seconds = {}
