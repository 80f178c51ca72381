"""The contract of a drafter: propose a few tokens that the target may say next.

    share(cache)                      the target's own cache, to read
    begin(request, rows, hidden)      a call begins: forget the last one
    propose(rows, limits) -> [Draft]  one per row, at most limits[i] tokens; fewer or none is allowed; skipped if all limits are 0
    observe(accepted, hidden)         how many tokens of each row's last draft were kept
    select(keep)                      only these rows go on

A `Row` shows `history` (prompt and text so far), `prompt` and `generator` (draw from
that one, so that equal seeds give equal texts). `request` shows `model` (the target,
never to be changed), `sampling` and `end_ids`. A drafter serves one call at a time and
starts every call alike. Whatever it proposes, the text stays right and only the speed
changes: see `labkit.generate.verify`.

`observe` is called after every pass, also if nothing was asked for; the histories have
grown by then. A drafter with `wants_hidden` gets the target's hidden states (after the
final norm): in `begin` those of the prompt's tokens, [T, E] per row (the last T, if a
prefix was cached); in `observe` one for each token that the history has grown by,
beginning with the token that was last before. So there is a state for every token of
the history but the last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.cache import KVCache
from labkit.generate.request import Request
from labkit.generate.row import Row
from labkit.generate.sampling import InvalidLogits, Past, draw, probabilities, process
from labkit.model.decoder import Decoder


@dataclass(frozen=True)
class Draft:
    """Tokens, and the distributions [n, V] that they were drawn from.

    The distributions are None if the tokens were not drawn. V is the target's
    vocabulary size.
    """

    tokens: Sequence[int] = ()
    probabilities: Tensor | None = None


NOTHING = Draft()


class Drafter(ABC):
    """`cost`: seconds of a drafted token / seconds of a target step, as estimated from bytes."""

    name = "drafter"
    wants_hidden = False
    cost = 0.0

    def check(self, target: Decoder) -> None:  # noqa: B027
        """Raise BadRequest if this drafter cannot draft for `target`.

        Called before any work.
        """

    def share(self, cache: KVCache | None) -> None:  # noqa: B027
        """Receive the target's cache, before `begin`.

        `cache` is None if it cannot be shared in this call. A drafter that writes to it
        must restore its lengths; the target overwrites the entries after them.
        """

    def begin(  # noqa: B027
        self, request: Request, rows: Sequence[Row], hidden: Sequence[Tensor] | None = None
    ) -> None:
        """Begin a call, after the prefill and the first token of each row."""

    @abstractmethod
    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        """Return a draft per row, of at most `limits[i]` tokens.

        A limit of 0 asks for no tokens.
        """

    def observe(self, accepted: Sequence[int], hidden: Sequence[Tensor] | None = None) -> None:  # noqa: B027
        """Learn how many tokens of each row's last draft were kept."""

    def select(self, keep: Sequence[int]) -> None:  # noqa: B027
        """Keep only these rows: places in the list of rows that this pass had."""

    def map(self, wrap: Callable[[Drafter], Drafter]) -> Drafter:
        """Return this drafter wrapped by `wrap`.

        A drafter made of others wraps each of them.
        """
        return wrap(self)


class Growing:
    """The draft of one row as it grows, token by token, from a draft model's logits.

    `ids` [v]: the token that each logit is for; None: 0 to v - 1.
    """

    def __init__(self, request: Request, row: Row, limit: int, ids: Tensor | None = None):
        self.request, self.row, self.limit, self.ids = request, row, limit, ids
        self.tokens: list[int] = []
        self.drawn: list[Tensor] = []

    def add(self, logits: Tensor) -> bool:
        """Add the token that follows, from logits [v].

        Return whether another one may follow.

        The sampling settings are the target's, penalties included.
        """
        request, row, ids = self.request, self.row, self.ids
        if request.sampling.plain_greedy:
            best = logits.argmax()
            self.tokens.append(int(best if ids is None else ids[best]))
            return len(self.tokens) < self.limit
        scores = logits.new_full((request.model.config.vocab_size,), float("-inf"))
        scores[slice(logits.numel()) if ids is None else ids] = logits
        past = Past([*row.history, *self.tokens], len(row.prompt), request.end_ids)
        try:
            if request.sampling.temperature == 0:
                self.tokens.append(int(process(scores, request.sampling, past).argmax()))
            else:
                q = probabilities(scores, request.sampling, past)
                self.tokens.append(draw(q, row.generator))
                self.drawn.append(q)
        except InvalidLogits:  # nothing is left that may be drafted
            return False
        return len(self.tokens) < self.limit

    def draft(self) -> Draft:
        return Draft(self.tokens, torch.stack(self.drawn) if self.drawn else None)
