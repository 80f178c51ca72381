"""Which drafted tokens stay: one rule, after which every text is as likely as without drafting.

The target's distribution p at a drafted token x, the distribution q that x was drawn from:

    keep x with probability min(1, p(x) / q(x));  else draw from max(p - q, 0), made to sum to 1, and stop there
    all kept: one more token from the target's next distribution, which the same pass has computed (the bonus)

Then P(token) = min(p, q) + (1 - sum min(p, q)) * max(p - q, 0) / sum max(p - q, 0) = p, whatever q was (Leviathan et al.,
2211.17192; Chen et al., 2302.01318). A draft that was not drawn (look-up, an argmax) is a point mass: q(x) = 1. Scoring it
with the probabilities that it was *not* drawn from is the classic mistake. Greedy is the same rule with p a point mass:
keep x where it is the target's own choice. p and q are what `sampling.probabilities` makes of logits, penalties counted
per token: the second drafted token already knows the first.

Cost: greedy, one argmax over the pass; sampling, one softmax a token looked at. A pass always gives one token or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.generate.request import Row
from labkit.generate.sampling import InvalidLogits, Sampling, draw, probabilities, process


class InvalidDraft(ValueError):
    """A draft that no rule can judge: probabilities that are no distribution, or a token that they could not have drawn."""


def acceptance(target: Tensor, draft: Tensor | None, token: int) -> float:
    """The probability of keeping `token`: min(1, p / q); `draft` None is a point mass."""
    p, q = float(target[token]), 1.0 if draft is None else float(draft[token])
    if not 0 < q < math.inf:
        raise InvalidDraft(f"Token {token} was drafted with probability {q}: it cannot have been drawn from that.")
    return min(1.0, p / q)


def residual(target: Tensor, draft: Tensor | None, token: int) -> Tensor:
    """What to draw from after `token` was refused: max(p - q, 0), not made to sum to 1.

    Where nothing is left (p and q equal but for rounding) a refusal has no probability either, and p itself is right."""
    if draft is None:
        left = target.clone()
        left[token] = 0
    else:
        left = (target - draft).clamp(min=0)
    total = float(left.sum())
    if math.isnan(total):
        raise InvalidDraft("The draft's probabilities hold NaN: no token can be drawn from what they leave.")
    return left if total > 0 else target


def verify_row(logits: Tensor, drafted: Sequence[int], distributions: Tensor | None, row: Row, sampling: Sampling,
               end_ids: frozenset[int]) -> tuple[list[int], int]:
    """(tokens to add, how many of them were drafted) from logits [n + 1, V] after the row's last token and each drafted.

    `distributions` [n, V]: what the drafted tokens were drawn from; None is a point mass. Raises InvalidLogits for a row
    of logits that is reached, never for one behind a refusal."""
    history, num_prompt = list(row.history), len(row.prompt)
    for i, token in enumerate(drafted):
        if sampling.temperature == 0:
            chosen = int(process(logits[i], sampling, history, num_prompt, end_ids).argmax())
            if chosen != token:
                return [*drafted[:i], chosen], i
        else:
            p = probabilities(logits[i], sampling, history, num_prompt, end_ids)
            q = None if distributions is None else distributions[i]
            if torch.rand((), dtype=torch.float64, generator=row.generator).item() >= acceptance(p, q, token):
                return [*drafted[:i], draw(residual(p, q, token), row.generator)], i
        history.append(token)
    n = len(drafted)
    if sampling.temperature == 0:
        bonus = int(process(logits[n], sampling, history, num_prompt, end_ids).argmax())
    else:
        bonus = draw(probabilities(logits[n], sampling, history, num_prompt, end_ids), row.generator)
    return [*drafted, bonus], n


def verify_greedy(logits: Tensor, drafted: Sequence[Sequence[int]]) -> list[tuple[list[int], int]]:
    """The same for every row at once where the largest logit decides as it stands: logits [B, T, V], T > a row's drafts."""
    best = logits.argmax(-1, keepdim=True)  # [B, T, 1]; the lowest id among equals, as in plain decoding
    chosen, largest = best[..., 0].tolist(), logits.gather(-1, best)[..., 0].tolist()
    verdicts = []
    for tokens, mine, values in zip(drafted, chosen, largest):
        kept = 0
        while kept < len(tokens) and tokens[kept] == mine[kept]:
            kept += 1
        if not all(map(math.isfinite, values[: kept + 1])):
            raise InvalidLogits("The largest of the model's logits is not finite, so no token can be chosen from that row.")
        verdicts.append(([*tokens[:kept], mine[kept]], kept))
    return verdicts
