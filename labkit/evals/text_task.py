"""The task `text` of `labkit eval`: `text`'s sums passage by passage, over code, prose and seven languages.

    kl               nats a token over the full vocabulary, to a reference in the same run (`Remembered`)
    kl_lower_bound   the same to a stored reference of k tokens (`TopK`), which can only be lower
    top1             share of tokens where both put the same token first
    nats_per_token, bits_per_byte    how well the text is predicted

A window slides over long texts: every token but the first of a document is scored once, later ones with at least `overlap`
tokens of context. Languages are MMLU's translated questions. Cost: one forward pass over the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labkit.errors import BadRequest
from labkit.evals.reading import Passage, cut
from labkit.evals.task import ItemScore, Metric
from labkit.evals.text import score
from labkit.evals.through_cache import ThroughCache, evaluate
from labkit.texts import EVALUATION_SLICES, LANGUAGES, evaluation_documents

SLICES = ("code", "prose", *LANGUAGES[1:])
COMPARED = (Metric("kl", "nats/token", higher_is_better=False), Metric("top1"))
BOUNDED = (Metric("kl_lower_bound", "nats/token", higher_is_better=False), Metric("top1"))
ALONE = (
    Metric("bits_per_byte", "bits/byte", higher_is_better=False),
    Metric("nats_per_token", "nats/token", higher_is_better=False),
)


def make(model, limit: int | None = None, **options) -> Text:
    return Text(model.tokenizer, limit, **options)


def check_slices(names: Sequence[str]) -> tuple[str, ...]:
    """The names, or a refusal with those that there are."""
    allowed = (*EVALUATION_SLICES, *LANGUAGES[1:])
    unknown = [name for name in names if name not in allowed]
    if unknown or not names:
        raise BadRequest(f"The task text has no slice {(*unknown, '')[0]!r}; choose from {', '.join(allowed)}.")
    return tuple(names)


@dataclass(frozen=True)
class Text:
    """`limit` counts tokens a slice. `reference`: a `Remembered` or a `TopK` of the same passages."""

    tokenizer: object
    limit: int | None = None
    slices: tuple[str, ...] = SLICES
    length: int = 512
    overlap: int = 64
    reference: object = None
    name = "text"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        if self.reference is None:
            return ALONE
        return (*(BOUNDED if hasattr(self.reference, "compare") else COMPARED), *ALONE)

    def items(self) -> list[Passage]:
        found = []
        for name in check_slices(self.slices):
            documents = ((document.name, document.text) for document in evaluation_documents(name))
            found += cut(documents, name, self.tokenizer, self.limit, self.length, self.overlap)
        return found

    def score(self, model, items: Sequence[Passage]) -> Iterator[ItemScore]:
        for passage in items:
            yield as_item(score(model, passage, self.reference), self.metrics[0].name)


def as_item(found, kl: str = "kl") -> ItemScore:
    """A `PassageScore` as an item."""
    metrics = {"bits_per_byte": (found.nll / math.log(2), found.nbytes), "nats_per_token": (found.nll, found.n)}
    if found.kl is not None:
        metrics = {kl: (found.kl, found.n), "top1": (found.top1, found.n), **metrics}
    return ItemScore(found.id, found.slice, metrics, n=found.n)


@dataclass(frozen=True)
class TextThroughCache:
    """The same sums read through a KV cache of a format; see `through_cache` for which tokens count."""

    how: ThroughCache
    passages: Sequence[Passage]
    reference: object = None
    name = "text"
    metrics = (*COMPARED, *ALONE)

    def items(self) -> Sequence[Passage]:
        return self.passages

    def score(self, model, items: Sequence[Passage]) -> Iterator[ItemScore]:
        for passage in items:
            yield as_item(evaluate(model, [passage], self.how, self.reference)[0])
