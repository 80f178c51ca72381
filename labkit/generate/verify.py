"""Decide which drafted tokens are kept, without changing the distribution of the text.

Let p be the target's distribution at a drafted token x, and q the distribution from which
x was drawn.

    keep x with probability min(1, p(x) / q(x))
    if x is rejected: draw from max(p - q, 0), normalized to sum 1, and stop
    if all are kept: draw one more token from the target's next distribution (the bonus)

Then P(token) = min(p, q) + (1 - sum min(p, q)) * max(p - q, 0) / sum max(p - q, 0) = p
for every q (Leviathan et al., 2211.17192; Chen et al., 2302.01318). A token that was not
drawn at random (from look-up or an argmax) has q(x) = 1. It is a classic mistake to use
probabilities from which the token was *not* drawn. With greedy decoding p is a point
mass, so x is kept if it is the target's choice. p and q come from
`sampling.probabilities`. Penalties for the second drafted token also count the first.

Cost: one argmax over the pass if greedy, else one softmax per examined token. A pass
always gives at least one token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.generate.drafter import Draft
from labkit.generate.row import Row
from labkit.generate.sampling import (
    InvalidLogits,
    Past,
    Sampling,
    draw,
    probabilities,
    process,
    sample,
)

Judged = tuple[list[int], int]  # tokens to add, and how many of them were drafted


class InvalidDraft(ValueError):
    """A draft has an invalid distribution, an impossible token or too many tokens."""


def acceptance(p: Tensor, q: Tensor | None, token: int) -> float:
    """Return the probability min(1, p / q) of keeping `token`.

    A `q` of None is a point mass at `token`. Raises InvalidDraft if `q` is not a finite
    number above 0 there.
    """
    drawn = 1.0 if q is None else float(q[token])
    if not 0 < drawn < math.inf:
        raise InvalidDraft(f"Token {token} has probability {drawn} in the draft it was drawn from.")
    return min(1.0, float(p[token]) / drawn)


def residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """Return the weights to draw from after `token` was rejected: max(p - q, 0).

    They are not normalized. A `q` of None is a point mass at `token`. If all weights are
    0, p and q are equal up to rounding, and p is returned. Raises InvalidDraft if `q`
    has NaN.
    """
    if q is None:
        left = p.clone()
        left[token] = 0
    else:
        left = (p - q).clamp(min=0)
    total = float(left.sum())
    if math.isnan(total):
        raise InvalidDraft("The draft's probabilities contain NaN, so no token can be drawn.")
    return left if total > 0 else p


def verify_row(
    logits: Tensor, draft: Draft, row: Row, sampling: Sampling, end_ids: frozenset[int]
) -> Judged:
    """Judge a draft of n tokens by logits [n + 1, V]: after the last token and each drafted one.

    Raises InvalidLogits if no token can be chosen from logits that are examined. Logits
    after a rejection are not examined.
    """
    history = list(row.history)
    past = Past(history, len(row.prompt), end_ids)
    for i, token in enumerate(draft.tokens):
        if sampling.temperature == 0:
            choice = int(process(logits[i], sampling, past).argmax())
            if choice != token:
                return [*draft.tokens[:i], choice], i
        else:
            p = probabilities(logits[i], sampling, past)
            q = None if draft.probabilities is None else draft.probabilities[i]
            uniform = torch.rand((), dtype=torch.float64, generator=row.generator).item()
            if uniform >= acceptance(p, q, token):
                return [*draft.tokens[:i], draw(residual(p, q, token), row.generator)], i
        history.append(token)
    n = len(draft.tokens)
    bonus = sample(logits[n], sampling, past, row.generator)
    return [*draft.tokens, bonus], n


def verify_greedy(logits: Tensor, drafts: Sequence[Draft]) -> list[Judged]:
    """Judge the drafts of all rows by the largest of each logits [B, T, V].

    This is the fast path of greedy decoding without penalties and bans. Raises
    InvalidLogits if an examined maximum is not finite.
    """
    best = logits.argmax(-1, keepdim=True)  # [B, T, 1]; the lowest id among equals
    choices, largest = best[..., 0].tolist(), logits.gather(-1, best)[..., 0].tolist()
    judged = []
    for draft, choice, values in zip(drafts, choices, largest):
        kept = 0
        while kept < len(draft.tokens) and draft.tokens[kept] == choice[kept]:
            kept += 1
        if not all(map(math.isfinite, values[: kept + 1])):
            raise InvalidLogits("The largest logit is not finite, so no token can be chosen.")
        judged.append(([*draft.tokens[:kept], choice[kept]], kept))
    return judged
