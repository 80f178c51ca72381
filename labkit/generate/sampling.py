"""From logits to a token: one way, used by plain decoding, batches and the speculative accept rule alike.

For each token, in this order (that of transformers, so that equal settings mean the same distribution):

    penalties        repetition r: l / r if l > 0 else l * r, for tokens of the prompt or the text (CTRL, 1909.05858)
                     frequency f, presence p: l - f * count - p * (count > 0), for generated tokens only
    bans             end tokens before `min_new_tokens`; the last token of a bad word whose start has just been said
    temperature t    l / t; 0 is greedy: the largest logit, the lowest id among equals, nothing further
    top-k            the k largest (lowest ids among equals)
    top-p            the fewest tokens whose probabilities reach p (Holtzman et al., 1904.09751)
    min-p            tokens at least min_p times as likely as the likeliest (2407.01082)

`process` returns logits, `probabilities` the distribution, `sample` a token; all work on one row [V] in float32.
Cost: greedy without penalties is one argmax and skips all this; top-p sorts the vocabulary, the dearest part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from labkit.errors import BadRequest


class InvalidLogits(ValueError):
    """A row of logits from which no token can be chosen: NaN, +inf, or -inf everywhere."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the default is greedy. `bad_words` are sequences of token ids. Row r uses seed + r."""

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

    def __post_init__(self):
        number, whole = (lambda x: isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x)), _is_whole
        self._check("temperature", number, lambda x: x >= 0, "a number from 0 (greedy) up")
        self._check("top_k", whole, lambda x: x >= 1, "a whole number from 1 up, or None for all tokens", none=True)
        self._check("top_p", number, lambda x: 0 < x <= 1, "a number above 0 and up to 1, or None", none=True)
        self._check("min_p", number, lambda x: 0 <= x <= 1, "a number from 0 to 1, or None", none=True)
        self._check("repetition_penalty", number, lambda x: x > 0, "a number above 0 (1 changes nothing)")
        self._check("frequency_penalty", number, lambda x: True, "a number (0 changes nothing)")
        self._check("presence_penalty", number, lambda x: True, "a number (0 changes nothing)")
        self._check("min_new_tokens", whole, lambda x: x >= 0, "a whole number from 0 up")
        self._check("seed", whole, lambda x: 0 <= x < 2**63, "a whole number from 0 to 2**63 - 1")
        self._check("bad_words", _are_words, lambda words: True, "sequences of token ids, each at least one long")
        object.__setattr__(self, "bad_words", tuple(map(tuple, self.bad_words)))  # hashable, and out of reach

    def _check(self, name, right_type, in_range, allowed, none=False):
        value = getattr(self, name)
        if not (value is None and none) and not (right_type(value) and in_range(value)):
            raise BadRequest(f"{name} is {value!r}; give {allowed}.")

    @property
    def plain_greedy(self) -> bool:
        """Whether the next token is the largest logit as it stands."""
        return self.temperature == 0 and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether what was said before changes the logits."""
        penalised = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return bool(penalised or self.min_new_tokens or self.bad_words)


def process(logits: Tensor, sampling: Sampling, tokens: Sequence[int] = (), num_prompt: int = 0,
            end_ids: Sequence[int] = ()) -> Tensor:
    """Logits [V] of the token after `tokens` (prompt, then generated) -> logits [V] to choose from; -inf is banned."""
    if logits.ndim != 1:
        raise ValueError(f"Logits have shape {tuple(logits.shape)}; process one row [V] at a time.")
    scores = logits.float().clone()
    _check_row(scores.max(), "the model's logits")
    if sampling.changes_logits:
        _penalise(scores, sampling, tokens, num_prompt)
        _ban(scores, sampling, tokens, num_prompt, end_ids)
        _check_row(scores.max(), "the logits left after the banned tokens")
    if sampling.temperature == 0:
        return scores
    scores = (scores - scores.max()) / sampling.temperature  # largest 0: a small temperature cannot overflow
    return _keep_likely(scores, sampling)


def probabilities(logits: Tensor, sampling: Sampling, tokens: Sequence[int] = (), num_prompt: int = 0,
                  end_ids: Sequence[int] = ()) -> Tensor:
    """The distribution [V] that `sample` draws from; greedy is a point mass."""
    scores = process(logits, sampling, tokens, num_prompt, end_ids)
    if sampling.temperature == 0:
        return torch.zeros_like(scores).scatter_(0, scores.argmax(0, keepdim=True), 1.0)
    return scores.softmax(0)


def draw(distribution: Tensor, generator: torch.Generator) -> int:
    """One token from `distribution` [V]; one uniform number from a CPU `generator`, the same on every device."""
    uniform = min(torch.rand((), dtype=torch.float64, generator=generator).item(), 1 - 2**-40)
    cumulative = distribution.double().cumsum(0)
    return int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))  # never a token of probability 0


def sample(logits: Tensor, sampling: Sampling, tokens: Sequence[int] = (), num_prompt: int = 0,
           end_ids: Sequence[int] = (), generator: torch.Generator | None = None) -> int:
    """The next token after `tokens`; `generator` is advanced once unless greedy."""
    if sampling.temperature == 0:
        return int(process(logits, sampling, tokens, num_prompt, end_ids).argmax())
    return draw(probabilities(logits, sampling, tokens, num_prompt, end_ids), generator)


def greedy(logits: Tensor) -> list[int]:
    """The largest logit of each row [B, V], the lowest id among equals: the fast path of plain greedy decoding."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        values = logits.detach().numpy()  # NumPy's search takes a tenth of the time of PyTorch's, and also finds a NaN
        ids = values.argmax(-1).tolist()
        largest = [float(row[id]) for row, id in zip(values, ids)]
    else:
        best = logits.argmax(-1, keepdim=True)
        ids, largest = best.view(-1).tolist(), logits.gather(-1, best).view(-1).tolist()  # argmax finds a NaN, if any
    for value in largest:
        if not math.isfinite(value):
            _check_row(value, "the model's logits")
    return ids


def _check_row(largest: Tensor | float, what: str) -> None:
    largest = float(largest)  # NaN if any is; -inf if all are
    if not math.isfinite(largest):
        raise InvalidLogits(f"The largest of {what} is {largest}, so no token can be chosen.")


def _penalise(scores: Tensor, sampling: Sampling, tokens: Sequence[int], num_prompt: int) -> None:
    if sampling.repetition_penalty != 1 and len(tokens):
        seen = torch.tensor(sorted(set(tokens)), device=scores.device)
        old = scores[seen]
        scores[seen] = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    counts = Counter(tokens[num_prompt:])
    if counts and (sampling.frequency_penalty or sampling.presence_penalty):
        said = torch.tensor(list(counts), device=scores.device)
        times = torch.tensor(list(counts.values()), device=scores.device, dtype=scores.dtype)
        scores[said] -= sampling.frequency_penalty * times + sampling.presence_penalty


def _ban(scores: Tensor, sampling: Sampling, tokens: Sequence[int], num_prompt: int, end_ids: Sequence[int]) -> None:
    banned = list(end_ids) if len(tokens) - num_prompt < sampling.min_new_tokens else []
    for *start, last in sampling.bad_words:
        if len(start) <= len(tokens) and list(tokens[len(tokens) - len(start) :]) == start:
            banned.append(last)
    if banned:
        scores[torch.tensor(banned, device=scores.device)] = float("-inf")


def _keep_likely(scores: Tensor, sampling: Sampling) -> Tensor:
    """Top-k, top-p and min-p on scores whose largest is 0."""
    minus_inf, V = float("-inf"), scores.numel()
    if sampling.top_k is not None and sampling.top_k < V:
        smallest = scores.topk(sampling.top_k).values[-1]
        above, equal = scores > smallest, scores == smallest
        room = sampling.top_k - above.sum()
        scores = scores.masked_fill(~(above | (equal & (equal.cumsum(0) <= room))), minus_inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        likely, order = scores.sort(descending=True, stable=True)  # stable: the lowest id first among equals
        before = likely.softmax(0).cumsum(0).roll(1)
        before[0] = 0.0  # the likeliest token always stays
        scores = scores.index_fill(0, order[before >= sampling.top_p], minus_inf)
    if sampling.min_p:
        scores = scores.masked_fill(scores < math.log(sampling.min_p), minus_inf)
    return scores


def _are_words(value: object) -> bool:
    sequence = lambda x: isinstance(x, Sequence) and not isinstance(x, str)  # noqa: E731
    return sequence(value) and all(sequence(w) and w and all(_is_whole(t) and t >= 0 for t in w) for w in value)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
