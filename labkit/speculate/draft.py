"""What every drafter promises: a few tokens that the target may say next, and from what they were drawn.

    share(cache)                      the target's own cache, to read
    begin(request, rows, hidden)      a call begins: forget the last one
    propose(rows, limits) -> [Draft]  one a row, at most limits[i] tokens; fewer or none is allowed
    observe(accepted, hidden)         how many of each row's tokens stayed; the histories have grown (after every pass, also
                                      one for which nothing could be asked)
    select(keep)                      only these rows go on

A `Row` shows `history` (prompt and committed text), `prompt` and `generator` (draw from that one, so that equal seeds give
equal texts). `request` shows `model` (the target: to be read, never changed), `sampling` and `end_ids`. A drafter is used for
one call at a time and starts every call alike. Nothing it does can make the text wrong, only slow: see `generate.verify`.

A drafter with `wants_hidden` gets the target's hidden states (after the final norm, what its head reads): in `begin` those of
the prompt's tokens, [T, E] a row (the last T, where a prefix was in the cache already); in `observe` one for each token that
the history has grown by, beginning with the one that was last before. So there is a state for every token of the history but
the last. (Where two drafters take turns, the history may have grown by more than one's own accepted tokens and one.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.generate.request import Request, Row
from labkit.generate.sampling import draw, probabilities, process


@dataclass(frozen=True)
class Draft:
    """Tokens, and the distributions [n, V] (the target's V) that they were drawn from; None: they were not drawn."""

    tokens: Sequence[int] = ()
    probabilities: Tensor | None = None


NOTHING = Draft()


def drafted(tokens: Sequence[int], drawn: Sequence[Tensor]) -> Draft:
    """The draft of `tokens`; `drawn`: the distribution [V] of each, or none where they were not drawn."""
    if not tokens:
        return NOTHING
    return Draft(tokens, torch.stack(drawn) if drawn else None)


class Drafter(ABC):
    """`cost`: seconds of a drafted token as a share of a target step, as far as it can be told from bytes."""

    name = "drafter"
    wants_hidden = False
    cost = 0.0

    def check(self, target) -> None:  # noqa: B027  (most have nothing to check)
        """Raise BadRequest where this drafter cannot draft for `target`; called before any work."""

    def begin(self, request: Request, rows: Sequence[Row], hidden: Sequence[Tensor] | None = None) -> None:  # noqa: B027
        """A call begins, after the prefill and the first token of each row."""

    def share(self, cache) -> None:  # noqa: B027
        """The target's cache, before `begin`; its rows are the drafter's. Whoever drafts in it leaves its lengths as they
        were: what it wrote behind them is overwritten by the target. None: it is not to be had in this call."""

    @abstractmethod
    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        """What may come next in each row, at most `limits[i]` tokens; a limit of 0 asks for nothing."""

    def observe(self, accepted: Sequence[int], hidden: Sequence[Tensor] | None = None) -> None:  # noqa: B027
        """How many tokens of each row's last draft stayed."""

    def select(self, keep: Sequence[int]) -> None:  # noqa: B027
        """The rows that go on, by their places in the last `propose`."""

    def adaptive(self, verify: Sequence[float] | None = None) -> Drafter:
        """This drafter with draft lengths that follow the running acceptance. `verify`: measured costs of a target pass
        (`labkit.plan.time.SpeculationCosts`); None is what is usual."""
        from labkit.speculate.adaptive import Adaptive

        return Adaptive(self, verify)


def choose(logits: Tensor, request: Request, row: Row, drafted: Sequence[int],
           ids: Tensor | None = None) -> tuple[int, Tensor | None]:  # fmt: skip
    """The token after `drafted`, from the draft's logits [v], and the distribution [V] it was drawn from (greedy: None).

    The settings are the target's, penalties included, so that both sides mean the same by them. `ids` [v]: the token that
    each logit is for; None is 0 to v - 1. Raises InvalidLogits where nothing may be drafted."""
    sampling = request.sampling
    if sampling.plain_greedy:
        best = logits.argmax()
        return int(best if ids is None else ids[best]), None
    scores = logits.new_full((request.model.config.vocab_size,), float("-inf"))
    scores[slice(logits.numel()) if ids is None else ids] = logits
    history, num_prompt = [*row.history, *drafted], len(row.prompt)
    if sampling.temperature == 0:
        return int(process(scores, sampling, history, num_prompt, request.end_ids).argmax()), None
    q = probabilities(scores, sampling, history, num_prompt, request.end_ids)
    return draw(q, row.generator), q
