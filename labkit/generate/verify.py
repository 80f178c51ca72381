"""Decide which drafted tokens stay; texts stay as likely as without drafting.

The target's distribution p at a drafted token x, and the distribution q that x was
drawn from:

    keep x with probability min(1, p(x) / q(x))
    else draw from max(p - q, 0), made to sum to 1, and stop there
    all kept: draw one more token from the target's next distribution (the bonus)

Then P(token) = min(p, q) + (1 - sum min(p, q)) * max(p - q, 0) / sum max(p - q, 0) = p,
whatever q was (Leviathan et al., 2211.17192; Chen et al., 2302.01318). A draft that was
not drawn (look-up, an argmax) is a point mass: q(x) = 1. A classic mistake is to use
probabilities that the token was *not* drawn from. Greedy is the same rule with p a
point mass: keep x if it is the target's choice. p and q come from
`sampling.probabilities`, and penalties count every token: the second drafted token
already knows the first.

Cost: greedy, one argmax over the pass; sampling, one softmax per examined token. A pass
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
    """Return the probability of keeping `token`: min(1, p / q).

    `q` None is a point mass.
    """
    drawn = 1.0 if q is None else float(q[token])
    if not 0 < drawn < math.inf:
        raise InvalidDraft(f"Token {token} has probability {drawn} in the draft it was drawn from.")
    return min(1.0, float(p[token]) / drawn)


def residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """Return what to draw from after a rejection: max(p - q, 0), not normalized.

    If the difference is 0 everywhere, p and q are equal up to rounding, and p is
    returned.
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
    """Judge a draft by logits [n + 1, V], after the last token and each drafted one.

    Raises InvalidLogits for a row of logits that is reached, never for one after a
    rejection.
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
    """Judge the drafts of all rows at once if the largest logit decides: logits [B, T, V]."""
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
