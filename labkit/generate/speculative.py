"""Speculative decoding: a drafter proposes tokens, one target pass judges them all.

    draft    d1 .. dn                        cheap, one after another (or looked up)
    verify   one pass over [last, d1 .. dn]  reads the weights once for n + 1 tokens
    keep     d1 .. da and one token of the target   (see `labkit.generate.verify`)
    rewind   the cache to all tokens but the last, separately in each row

Greedy text stays the same, and sampled text keeps its distribution. Any drafter and any
cache can be used. A cache says how many tokens one pass may add (`most_at_once`) so
that it can be rewound and the answers are those of single steps. If that number is 1,
this is plain decoding.

It pays if checking a token is cheaper than making one: decoding is limited by reading
the weights. When it loses: drafts that are rejected or cost much, and batches so large
that arithmetic is the limit.
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
from labkit.generate.verify import InvalidDraft, Judged, verify_greedy, verify_row


class DrafterFailed(RuntimeError):
    """A drafter raised an error.

    The target and a given cache are as before the call.
    """


def speculate(request: Request, drafter: Drafter, longest: int, watch: Watch) -> Tokens:
    """Yield every token of every row; one target pass gives as many as it accepts."""
    batch = Batch(request, slack=longest)
    states: list[Tensor] | None = [] if drafter.wants_hidden else None
    with rewound_on_error(batch.cache):
        yield from batch.begin(states)
        begin(drafter, batch, states)
        while rows := batch.next_rows():
            watch.start()
            drafts = propose(drafter, batch, rows, longest)
            watch.lap("draft_s")
            judged, states = verify(batch, rows, drafts, drafter.wants_hidden)
            watch.lap("verify_s")
            tokens = batch.take(rows, [new for new, _ in judged])
            accepted = [min(kept, len(taken)) for taken, (_, kept) in zip(tokens, judged)]
            if batch.cache is not None:
                batch.cache.rewind([len(row.history) - 1 for row in batch.rows])
            watch.lap("overhead_s")
            observe(drafter, rows, accepted, states)
            watch.lap("draft_s")
            watch.count(rows, drafts, tokens, accepted)
            for taken in tokens:  # last, so that all is in order if the reader stops here
                yield from taken
        yield from batch.cancel()


def begin(drafter: Drafter, batch: Batch, states: Sequence[Tensor] | None) -> None:
    """Give the drafter the target's cache and the rows that have not ended."""
    live = batch.live()
    if live:
        with blamed(drafter):
            # A given cache keeps rows that have ended, and a drafter knows only live ones.
            drafter.share(None if batch.given and len(batch.rows) > 1 else batch.cache)
            hidden = None if states is None else [states[i] for i in live]
            drafter.begin(batch.request, [batch.rows[i] for i in live], hidden)


def propose(drafter: Drafter, batch: Batch, rows: Sequence[Row], longest: int) -> list[Draft]:
    """Return a draft per row, no longer than its budget and its cache allow."""
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
        valid = len(tokens) <= limit and (not len(tokens) or 0 <= min(tokens) <= max(tokens) < V)
        if not valid or (q is not None and tuple(q.shape) != (len(tokens), V)):
            raise InvalidDraft(
                f"The drafter {drafter.name} proposed {list(tokens)}; give at most {limit} ids "
                f"from 0 to {V - 1}. Probabilities have one row of {V} per token."
            )
    return drafts


@torch.inference_mode()
def verify(
    batch: Batch, rows: Sequence[Row], drafts: Sequence[Draft], wants_hidden: bool
) -> tuple[list[Judged], list[Tensor] | None]:
    """Judge the drafts of the live `rows` in one pass.

    If wanted, also return each row's hidden states from its last token on.
    """
    request, cached, live = batch.request, batch.cache is not None, batch.live()
    pieces: list[Sequence[int]] = [()] * len(batch.rows)
    for i, row, draft in zip(live, rows, drafts):
        pieces[i] = [*row.new_tokens(cached), *draft.tokens]

    def from_last_token(values: Tensor) -> list[Tensor]:
        starts = [-len(draft.tokens) - 1 for draft in drafts]
        return [values[i, : len(pieces[i])][start:] for i, start in zip(live, starts)]

    options = {"last_only": False, "return_hidden": wants_hidden}
    out = forward(request.model, batch.cache, pieces, **options)
    logits, states = out if wants_hidden else (out, None)
    if request.sampling.plain_greedy and cached:
        judged = verify_greedy(logits if len(live) == len(batch.rows) else logits[live], drafts)
    else:
        judged = [
            verify_row(scores, draft, row, request.sampling, request.end_ids)
            for scores, draft, row in zip(from_last_token(logits), drafts, rows)
        ]
    return judged, None if states is None else from_last_token(states)


def observe(
    drafter: Drafter, rows: Sequence[Row], accepted: Sequence[int], states: list[Tensor] | None
) -> None:
    """Tell the drafter which tokens were accepted, and which rows go on."""
    stay = [i for i, row in enumerate(rows) if row.reason is None]
    if stay:
        hidden = states and [own[: kept + 1] for own, kept in zip(states, accepted)]
        with blamed(drafter):
            drafter.observe(accepted, hidden)
            if len(stay) < len(rows):
                drafter.select(stay)


@contextmanager
def blamed(drafter: Drafter) -> Iterator[None]:
    """Raise a drafter's error as DrafterFailed, with the drafter's name."""
    try:
        with torch.inference_mode():
            yield
    except BadRequest:
        raise
    except Exception as error:
        raise DrafterFailed(
            f"The drafter {drafter.name} failed ({type(error).__name__}: {error}). The target and "
            "its cache are as before; decode without a drafter or use another one."
        ) from error


class Watch:
    """Time the phases of each pass and count drafted and accepted tokens, per row.

    `start` begins a pass. `lap(phase)` adds the seconds since the previous `start` or
    `lap` to that phase. `count` ends the pass. The loop never reads these numbers.
    """

    def __init__(self, rows: int):
        self.tallies = [Tally() for _ in range(rows)]

    def start(self) -> None:
        self.seconds: dict[str, Any] = dict.fromkeys(("draft_s", "verify_s", "overhead_s"), 0.0)
        self.last = now()

    def lap(self, phase: str) -> None:
        began, self.last = self.last, now()
        self.seconds[phase] += self.last - began

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
