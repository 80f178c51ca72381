"""Choose a token from logits, in the same way for every kind of decoding.

These steps change the logits l of one token in this order. It is the order of
transformers, so equal settings give equal distributions.

    penalties      repetition r: l / r if l > 0 else l * r, all earlier tokens (CTRL, 1909.05858)
                   frequency f, presence p: l - f * count - p * (count > 0), generated tokens only
    bans           end tokens before `min_new_tokens`; the last token of a bad word that has begun
    temperature t  l / t; with 0 (greedy) the largest logit is chosen and the rest is skipped
    top-k          keep the k largest
    top-p          keep the fewest tokens whose probabilities reach p (Holtzman et al., 1904.09751)
    min-p          keep tokens at least min_p times as likely as the most likely one (2407.01082)

Among equal logits, the lowest id comes first. `process` returns logits, `probabilities`
the distribution, and `sample` a token. All work on one row [V] in float32. Cost: greedy
decoding without penalties is one argmax. Otherwise top-p is the most expensive step,
because it sorts the vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.errors import Number, OrNone, Rule, Whole, check_fields

MINUS_INF = float("-inf")


class InvalidLogits(ValueError):
    """No token can be chosen from logits with NaN or +inf, or -inf everywhere."""


def _are_words(value: Any) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(word, Sequence) and word and all(map(TOKEN.accepts, word)) for word in value
    )


TOKEN = Whole(0)
WORDS = Rule("sequences of token ids, each of at least one id", _are_words)


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing tokens; the default is greedy.

    None turns a filter off. `bad_words` are sequences of token ids that must not appear.
    Row r of a batch uses seed + r. Raises BadRequest for a value that is not allowed.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_new_tokens: int = 0
    bad_words: Sequence[Sequence[int]] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(
            self,
            temperature=Number(0),
            top_k=OrNone(Whole(1)),
            top_p=OrNone(Number(above=0, most=1)),
            min_p=OrNone(Number(0, 1)),
            repetition_penalty=Number(above=0),
            frequency_penalty=Number(),
            presence_penalty=Number(),
            min_new_tokens=Whole(0),
            bad_words=WORDS,
            seed=Whole(0, 2**63 - 1),
        )
        object.__setattr__(self, "bad_words", tuple(map(tuple, self.bad_words)))  # hashable

    @property
    def plain_greedy(self) -> bool:
        """Whether the largest logit is chosen, without penalties and bans."""
        return self.temperature == 0 and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or bans change the logits."""
        neutral = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return neutral != (1, 0, 0) or bool(self.min_new_tokens or self.bad_words)


GREEDY = Sampling()


class Past(NamedTuple):
    """The ids before a token, how many of them are the prompt, and the end tokens."""

    tokens: Sequence[int] = ()
    num_prompt: int = 0
    end_ids: Collection[int] = ()


NO_PAST = Past()


def process(logits: Tensor, sampling: Sampling, past: Past = NO_PAST) -> Tensor:
    """Return the logits [V] to choose from; banned tokens have -inf.

    `logits` [V] are those of the model after `past`. Raises InvalidLogits if no token can
    be chosen.
    """
    scores = logits.float().clone()
    _check_largest(scores.max(), "the model's logits")
    if sampling.changes_logits:
        _penalize(scores, sampling, past)
        _ban(scores, sampling, past)
        _check_largest(scores.max(), "the logits left after the banned tokens")
    if sampling.temperature == 0:
        return scores
    # With a largest score of 0, a small temperature cannot overflow.
    return _keep_likely((scores - scores.max()) / sampling.temperature, sampling)


def probabilities(logits: Tensor, sampling: Sampling, past: Past = NO_PAST) -> Tensor:
    """Return the distribution [V] that `sample` draws from; greedy is a point mass.

    The arguments and errors are those of `process`.
    """
    scores = process(logits, sampling, past)
    if sampling.temperature == 0:
        return torch.zeros_like(scores).scatter_(0, scores.argmax(0, keepdim=True), 1.0)
    return scores.softmax(0)


def draw(distribution: Tensor, generator: torch.Generator | None) -> int:
    """Draw a token from `distribution` [V] with one uniform number of a CPU `generator`."""
    uniform = min(torch.rand((), dtype=torch.float64, generator=generator).item(), 1 - 2**-40)
    cumulative = distribution.double().cumsum(0)
    # `right` never gives a token of probability 0.
    return int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))


def sample(
    logits: Tensor,
    sampling: Sampling,
    past: Past = NO_PAST,
    generator: torch.Generator | None = None,
) -> int:
    """Return the token after `past`; draw one number from `generator` unless greedy.

    The other arguments and the errors are those of `process`.
    """
    if sampling.temperature == 0:
        return int(process(logits, sampling, past).argmax())
    return draw(probabilities(logits, sampling, past), generator)


def greedy(logits: Tensor) -> list[int]:
    """Return the id of the largest logit in each row of [B, V], the lowest id among equals.

    This is the fast path of greedy decoding without penalties and bans. Raises
    InvalidLogits if the largest logit of a row is not finite.
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        rows = logits.detach().numpy()  # NumPy's argmax is ten times as fast, and finds NaN, too
        ids = rows.argmax(-1).tolist()
        largest = [float(row[id]) for row, id in zip(rows, ids)]
    else:
        best = logits.argmax(-1, keepdim=True)  # finds NaN, if there is one
        ids, largest = best[:, 0].tolist(), logits.gather(-1, best)[:, 0].tolist()
    for value in largest:
        if not math.isfinite(value):
            _check_largest(value, "the model's logits")
    return ids


def _check_largest(value: Tensor | float, what: str) -> None:
    value = float(value)  # NaN if there is one; -inf if all are
    if not math.isfinite(value):
        raise InvalidLogits(f"The largest of {what} is {value}, so no token can be chosen.")


def _penalize(scores: Tensor, sampling: Sampling, past: Past) -> None:
    penalty = sampling.repetition_penalty
    if penalty != 1 and len(past.tokens):
        seen = torch.tensor(sorted(set(past.tokens)), device=scores.device)
        old = scores[seen]
        scores[seen] = torch.where(old > 0, old / penalty, old * penalty)
    counts = Counter(past.tokens[past.num_prompt :])
    if counts and (sampling.frequency_penalty or sampling.presence_penalty):
        ids = torch.tensor(list(counts), device=scores.device)
        times = torch.tensor(list(counts.values()), device=scores.device, dtype=scores.dtype)
        scores[ids] -= sampling.frequency_penalty * times + sampling.presence_penalty


def _ban(scores: Tensor, sampling: Sampling, past: Past) -> None:
    tokens = past.tokens
    banned = list(past.end_ids) if len(tokens) - past.num_prompt < sampling.min_new_tokens else []
    for *start, last in sampling.bad_words:
        if len(start) <= len(tokens) and list(tokens[len(tokens) - len(start) :]) == start:
            banned.append(last)
    if banned:
        scores[torch.tensor(banned, device=scores.device)] = MINUS_INF


def _keep_likely(scores: Tensor, sampling: Sampling) -> Tensor:
    """Apply top-k, top-p and min-p to scores [V] whose largest is 0."""
    if sampling.top_k is not None and sampling.top_k < scores.numel():
        smallest = scores.topk(sampling.top_k).values[-1]
        above, equal = scores > smallest, scores == smallest
        room = sampling.top_k - above.sum()
        scores = scores.masked_fill(~(above | (equal & (equal.cumsum(0) <= room))), MINUS_INF)
    if sampling.top_p is not None and sampling.top_p < 1:
        likely, order = scores.sort(descending=True, stable=True)  # lowest id first among equals
        before = likely.softmax(0).cumsum(0).roll(1)
        before[0] = 0.0  # the most likely token always stays
        scores = scores.index_fill(0, order[before >= sampling.top_p], MINUS_INF)
    if sampling.min_p:
        scores = scores.masked_fill(scores < math.log(sampling.min_p), MINUS_INF)
    return scores
