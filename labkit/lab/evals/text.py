"""The task `text`: how well a model predicts text, and how far it moved from the unchanged model.

    kl              mean over tokens of sum_v p(v) (log p(v) - log q(v)), in nats, over the full
                    vocabulary; p is the unchanged model, q the scored one
    top1            share of tokens for which both models rank the same token first
    bits_per_byte   -log2 q(text) / bytes of the text
    nats_per_token  -ln q(text) / tokens

`kl` and `top1` need a reference. By default the slices are code (HumanEval with solutions), prose
(the evaluation part of the documentation) and MMLU's questions in seven languages. Nothing is
generated. 4,000 tokens determine a KL to a few per cent; a share of right answers would need a
thousand problems for that.
Cost: one forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from labkit.errors import BadRequest
from labkit.lab.evals import check_choices
from labkit.lab.evals.passages import SLICES, Passage, Remembered, cut, log_probs, plain_read
from labkit.lab.evals.task import ItemScore, Metric
from labkit.lab.evals.through_cache import ThroughCache
from labkit.lab.texts import EVALUATION_SLICES, LANGUAGES, evaluation_documents
from labkit.quant.calibrate import device_of

CHUNK = 128  # the number of tokens whose distributions are in memory at once
COMPARED = (Metric("kl", "nats/token", higher_is_better=False), Metric("top1"))
ALONE = (
    Metric("bits_per_byte", "bits/byte", higher_is_better=False),
    Metric("nats_per_token", "nats/token", higher_is_better=False),
)


@dataclass(frozen=True)
class Text:
    """Score passages of text.

    limit: the maximum number of tokens per slice; None takes all.
    length, overlap: the size of a passage in tokens and its context; see `passages.cut`.
    reference: the output of the unchanged model; see `against`.
    through: read the text through a KV cache. Without a reference, the same model is then
        compared with one pass without a cache.
    """

    tokenizer: object
    limit: int | None = None
    slices: tuple[str, ...] = SLICES
    length: int = 512
    overlap: int = 64
    reference: Remembered | None = None
    through: ThroughCache | None = None
    name = "text"

    def __post_init__(self):
        check_choices(self.slices, (*EVALUATION_SLICES, *LANGUAGES[1:]), "a slice of text")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return ALONE if self.reference is None and self.through is None else COMPARED + ALONE

    def items(self) -> list[Passage]:
        passages = []
        for name in self.slices:
            if self.through is not None:
                passages += self.through.passages(self.tokenizer, name, self.limit)
            else:
                documents = ((one.name, one.text) for one in evaluation_documents(name))
                size = (self.limit, self.length, self.overlap)
                passages += cut(documents, name, self.tokenizer, *size)
        return passages

    def against(self, model: nn.Module, progress: Callable = lambda line: None) -> Text:
        """Return this task with `model` as its reference. The model reads every passage once."""
        return replace(self, reference=Remembered(model, self.items(), progress))

    def score(self, model: nn.Module, items: Sequence[Passage]) -> Iterator[ItemScore]:
        for passage in items:
            if self.through is None:
                yield score(model, passage, self.reference)
            else:
                reference = self.reference or Remembered(model, [passage])
                yield score(model, passage, reference, self.through.read)


def make(model, limit: int | None = None, **options) -> Text:
    return Text(getattr(model, "tokenizer", None), limit, **options)


@torch.inference_mode()
def score(model: nn.Module, passage: Passage, reference=None, read=plain_read) -> ItemScore:
    """Score one passage.

    `reference(passage)` and `read(model, tokens)` return hidden states and a head, as
    `plain_read` does. Raises BadRequest if a distribution is not finite or if the two
    vocabularies differ.
    """
    tokens = torch.tensor([passage.tokens], device=device_of(model))
    states, head = read(model, tokens)
    known, known_head = reference(passage) if reference is not None else (None, None)
    nll, kl, top1, last = 0.0, 0.0, 0, tokens.shape[1] - 1
    for start in range(passage.first - 1, last, CHUNK):
        at = slice(start, min(start + CHUNK, last))
        q = log_probs(states[at], head)
        targets = tokens[0, at.start + 1 : at.stop + 1, None]
        nll -= float(q.gather(1, targets).sum(dtype=torch.float64))
        if known is not None:
            p = log_probs(known[at], known_head)
            if p.shape != q.shape:
                sizes = f"{p.shape[-1]} and {q.shape[-1]} tokens"
                raise BadRequest(f"The models have {sizes}; compare models of one vocabulary.")
            kl += float((p.exp() * (p - q)).sum(dtype=torch.float64))
            top1 += int((p.argmax(-1) == q.argmax(-1)).sum())
    if not math.isfinite(nll + kl):
        raise BadRequest(f"The output on passage {passage.id} is not finite; check the model.")
    n = len(passage.tokens) - passage.first
    metrics = {"kl": (kl, n), "top1": (top1, n)} if known is not None else {}
    metrics |= {"bits_per_byte": (nll / math.log(2), passage.nbytes), "nats_per_token": (nll, n)}
    return ItemScore(passage.id, passage.slice, metrics, n=n)
