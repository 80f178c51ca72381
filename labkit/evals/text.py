"""The task `text`: how far a model's next-token distributions are from the unchanged model's, and how well it predicts.

    kl             mean over tokens of sum_v p(v) (log p(v) - log q(v)), nats, over the full vocabulary; p the unchanged model
    top1           share of tokens where both put the same token first
    bits_per_byte  -log2 q(text) / bytes of that text

Slices `code` (HumanEval with solutions) and `prose` (a held-out part of the library's documentation), and `all`. Nothing is
generated, so 4,000 tokens settle a KL to a few per cent; a small model's task scores would need a thousand problems.
Intervals: bootstrap over passages, 95 %. Documents are cut into passages of at most `length` tokens, each read from
position 0; a passage's first token is context and not scored. One model in memory is enough: `Remembered` (in `reading`)
keeps the unchanged model's final hidden states; score it, quantise it in place, score it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from labkit.errors import BadRequest
from labkit.evals.reading import Passage, Remembered, cut, log_probs, plain_read
from labkit.quant.calibrate import device_of

SLICES = ("code", "prose")
CHUNK = 128  # tokens whose full distributions are held at once


@dataclass(frozen=True)
class PassageScore:
    """Sums over one passage's scored tokens, so that two runs can be compared passage by passage."""

    id: str
    slice: str
    n: int
    nbytes: int
    nll: float  # nats
    kl: float | None = None
    top1: int | None = None


@dataclass(frozen=True)
class TextTask:
    """`limit` counts tokens a slice; None scores everything."""

    tokenizer: object
    limit: int | None = 2048
    length: int = 512
    slices: tuple[str, ...] = SLICES

    def items(self) -> list[Passage]:
        from labkit.texts import evaluation_documents

        unknown = [s for s in self.slices if s not in SLICES]
        if unknown:
            raise BadRequest(f"The task text has no slice {unknown[0]!r}; choose from {', '.join(SLICES)}.")
        found = []
        for name in self.slices:
            documents = ((document.name, document.text) for document in evaluation_documents(name))
            found += cut(documents, name, self.tokenizer, self.limit, self.length)
        return found


@torch.inference_mode()
def score(model: nn.Module, passage: Passage, reference: Callable | None = None, read=None) -> PassageScore:
    """One passage. `reference`: a `Remembered`, or another model. Raises on distributions that are not numbers."""
    tokens = torch.tensor([passage.tokens], device=device_of(model))
    states, head = (read or plain_read)(model, tokens)
    if isinstance(reference, nn.Module):
        reference = Remembered(reference, [passage])
    stored = hasattr(reference, "compare")  # a part of each distribution, compared in its own way
    p_states, p_head = reference(passage) if reference is not None and not stored else (None, None)
    if p_states is not None:
        p_states = p_states[passage.first - 1 :]
    targets = tokens[0, passage.first :]
    states = states[passage.first - 1 :]
    nll, kl, top1 = 0.0, 0.0, 0
    for start in range(0, len(targets), CHUNK):
        stop = min(start + CHUNK, len(targets))
        q = log_probs(states[start:stop], head)
        nll -= float(q.gather(1, targets[start:stop, None]).sum(dtype=torch.float64))
        if p_states is not None:
            p = log_probs(p_states[start:stop], p_head)
            if p.shape != q.shape:
                raise BadRequest(
                    f"The two models have {p.shape[-1]} and {q.shape[-1]} tokens; KL compares models of one vocabulary."
                )
            top1 += int((p.argmax(-1) == q.argmax(-1)).sum())
            kl += float((p.exp() * (p - q)).sum(dtype=torch.float64))
        elif stored:
            below, agreed = reference.compare(passage, start, q)
            kl, top1 = kl + below, top1 + agreed
    if not math.isfinite(nll) or not math.isfinite(kl):
        raise BadRequest(
            f"The model's distribution on passage {passage.id} holds NaN or infinity; it cannot be scored."
        )
    with_reference = reference is not None
    return PassageScore(
        passage.id,
        passage.slice,
        len(targets),
        passage.nbytes,
        nll,
        kl if with_reference else None,
        top1 if with_reference else None,
    )


def evaluate(
    model: nn.Module, passages: Sequence[Passage], reference=None, progress=lambda line: None
) -> list[PassageScore]:
    """Every passage, in order."""
    if not passages:
        raise BadRequest("No passage was given to score; raise the limit or give longer documents.")
    found = []
    for passage in passages:
        found.append(score(model, passage, reference))
        progress(passage.id)
    return found


def results(scores: Sequence[PassageScore], seed: int = 0) -> list[dict]:
    """The records of `labkit eval text`: task, slice, metric, value, low, high, n (tokens)."""
    rows = []
    slices = list(dict.fromkeys(s.slice for s in scores))
    for name in [*slices, "all"]:
        chosen = [s for s in scores if name in ("all", s.slice)]
        metrics = {"bits_per_byte": ([s.nll / math.log(2) for s in chosen], [s.nbytes for s in chosen])}
        if chosen[0].kl is not None:
            metrics |= {
                "kl": ([s.kl for s in chosen], [s.n for s in chosen]),
                "top1": ([s.top1 for s in chosen], [s.n for s in chosen]),
            }
        for metric, (above, below) in metrics.items():
            value, low, high = ratio_interval(above, below, seed)
            rows.append(
                {
                    "task": "text",
                    "slice": name,
                    "metric": metric,
                    "value": value,
                    "low": low,
                    "high": high,
                    "n": sum(s.n for s in chosen),
                }
            )
    return rows


def ratio_interval(
    above: Sequence[float], below: Sequence[float], seed: int = 0, draws: int = 1000
) -> tuple[float, float | None, float | None]:
    """sum(above) / sum(below) and its 95 % bootstrap interval over items; no interval from one item."""
    a, b = torch.tensor(above, dtype=torch.float64), torch.tensor(below, dtype=torch.float64)
    value = float(a.sum() / b.sum())
    if len(a) < 2:
        return value, None, None
    pick = torch.randint(len(a), (draws, len(a)), generator=torch.Generator().manual_seed(seed))
    ratios = a[pick].sum(1) / b[pick].sum(1)
    low, high = torch.quantile(ratios, torch.tensor([0.025, 0.975], dtype=torch.float64))
    return value, float(low), float(high)
