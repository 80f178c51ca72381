"""The contract of a drafter, which proposes tokens that the target may choose next.

    share(cache)                      gives the target's cache, to read
    begin(request, rows, hidden)      starts a call: forget the previous one
    propose(rows, limits) -> [Draft]  one draft per row, of at most limits[i] tokens
    observe(accepted, hidden)         gives the number of accepted tokens of each row's draft
    select(keep)                      only these rows go on

A drafter may read three fields of a `Row`: `history` (the prompt and its new tokens),
`prompt` and `generator`. It must draw from that generator, so that equal seeds give equal
texts. It may read `model` (the target), `sampling` and `end_ids` of the request, and must
not change the target. A drafter serves one call at a time and starts every call in the
same state. Its proposals change only the speed, because the target checks them (see
`labkit.generate.verify`).

`propose` is skipped if all limits are 0. `observe` follows every pass, when the histories
have grown. A drafter with `wants_hidden` receives the target's hidden states after the
final norm. `begin` gives the states of the prompt's tokens, [T, E] per row. If a prefix
was cached, these are the last T tokens. `observe` gives one state per token added to the
history, starting with the token that was last before. So every token of the history
except the last has a state.
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
    """Drafted tokens, and the distributions [n, V] from which they were drawn.

    `probabilities` is None if the tokens were not drawn at random. V is the target's
    vocabulary size.
    """

    tokens: Sequence[int] = ()
    probabilities: Tensor | None = None


NOTHING = Draft()


class Drafter(ABC):
    """The base class of drafters.

    `cost` is seconds of a drafted token / seconds of a target step, estimated from bytes.
    """

    name = "drafter"
    wants_hidden = False
    cost = 0.0

    def check(self, target: Decoder) -> None:  # noqa: B027
        """Raise BadRequest if this drafter cannot draft for `target`; called before any work."""

    def share(self, cache: KVCache | None) -> None:  # noqa: B027
        """Receive the target's cache, before `begin`.

        `cache` is None if it cannot be shared in this call. A drafter that writes to it
        must restore its lengths. The target overwrites the entries after them.
        """

    def begin(  # noqa: B027
        self, request: Request, rows: Sequence[Row], hidden: Sequence[Tensor] | None = None
    ) -> None:
        """Start a call, after the prefill and the first token of each row."""

    @abstractmethod
    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        """Return a draft per row, of at most `limits[i]` tokens.

        A limit of 0 asks for no tokens.
        """

    def observe(self, accepted: Sequence[int], hidden: Sequence[Tensor] | None = None) -> None:  # noqa: B027
        """Receive the number of accepted tokens of each row's last draft."""

    def select(self, keep: Sequence[int]) -> None:  # noqa: B027
        """Keep only these rows, given by their indices in the last `propose`."""

    def map(self, wrap: Callable[[Drafter], Drafter]) -> Drafter:
        """Return `wrap(self)`; a drafter made of others wraps each of them instead."""
        return wrap(self)


class Growing:
    """The draft of one row, built token by token from a draft model's logits.

    `ids` [v] has the token of each logit. None means the tokens 0 to v - 1.
    """

    def __init__(self, request: Request, row: Row, limit: int, ids: Tensor | None = None):
        self.request, self.row, self.limit, self.ids = request, row, limit, ids
        self.tokens: list[int] = []
        self.drawn: list[Tensor] = []

    def add(self, logits: Tensor) -> bool:
        """Choose the next token from logits [v]; return True if another one may follow.

        The sampling settings, including penalties, are those of the target.
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
        except InvalidLogits:  # no token may be drafted
            return False
        return len(self.tokens) < self.limit

    def draft(self) -> Draft:
        return Draft(self.tokens, torch.stack(self.drawn) if self.drawn else None)
