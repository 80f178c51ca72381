"""Training that can be killed at any line: progress, checkpoints, and the same weights after a resume.

The order of texts is a function of the seed and the step, so a step needs nothing but the weights, the optimiser's two
moments and the running mean of the weights; all of them are in the checkpoint (safetensors, written aside and renamed).
What is kept in the end is that running mean: it is steadier than the last step (Polyak averaging).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from labkit.assets.whole import save_tensors
from labkit.errors import BadRequest
from labkit.speculate.corpus import Text


@dataclass(frozen=True)
class Training:
    """How to train. `tokens` of answers a step; the learning rate rises over `warmup` steps, stays, and falls to 0 over the
    last quarter. So a checkpoint from before that quarter can go on to more steps."""

    steps: int = 1500
    tokens: int = 2048
    learning_rate: float = 1e-3
    warmup: int = 50
    weight_decay: float = 0.01
    averaging: float = 0.98  # of the running mean, a step
    seed: int = 0
    every: int = 100  # steps between checkpoints and scores

    def __post_init__(self):
        if min(self.steps, self.tokens, self.every) < 1 or self.warmup < 0:
            raise BadRequest("steps, tokens and every are at least 1, and warmup at least 0; check the training's settings.")
        if not self.learning_rate > 0 or not 0 <= self.averaging < 1:
            raise BadRequest("learning_rate is above 0 and averaging from 0 to below 1; check the training's settings.")

    def rate(self, step: int) -> float:
        rise, fall = (step + 1) / max(self.warmup, 1), (self.steps - step) / (self.steps / 4)
        return self.learning_rate * min(1.0, rise, fall)


@dataclass(frozen=True)
class Progress:
    """One report: `score` is None between two checkpoints."""

    step: int
    steps: int
    loss: float
    seconds: float
    score: dict[str, float] | None = None


def fit(
    module: nn.Module,
    texts: Sequence[Text],
    loss: Callable[[Sequence[Text]], torch.Tensor],
    training: Training,
    checkpoint: Path | None = None,
    score: Callable[[], dict[str, float]] | None = None,
    on_progress: Callable[[Progress], object] = lambda progress: None,
) -> list[dict]:
    """Train `module` in place on `loss(some texts)`; returns the scores [{step, loss, seconds, ...}].

    `checkpoint`: a file to write to and to go on from. Raises BadRequest where it belongs to another training."""
    texts = [text for text in texts if len(text.tokens) - text.start > 4]
    if not texts:
        raise BadRequest("There is nothing to train on: no text has an answer of more than four tokens.")
    weights = {name: weight for name, weight in module.named_parameters() if weight.dtype.is_floating_point}
    for weight in weights.values():
        weight.requires_grad_(True)
    moments = [{name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2)]
    mean = {name: w.detach().clone() for name, w in weights.items()}
    signature = json.dumps([asdict(training) | {"steps": None}, len(texts), sum(len(t.tokens) for t in texts)])
    step, history, spent = 0, [], 0.0
    if checkpoint is not None and checkpoint.is_file():
        step, history, spent = _load(checkpoint, signature, weights, moments, mean)
        before = history[-1]["of"]
        if before != training.steps and step > 0.75 * min(before, training.steps):
            raise BadRequest(f"{checkpoint.name} is at step {step} of {before}, past the point from which {training.steps} steps can be "
                             "reached; remove it to start afresh.")  # fmt: skip
    started, losses = time.monotonic() - spent, []
    while step < training.steps:
        value = loss(_batch(texts, training, step))
        if not torch.isfinite(value):
            raise BadRequest(f"The loss is {value.item()} at step {step}; lower the learning rate ({training.learning_rate}).")
        module.zero_grad(set_to_none=True)
        value.backward()
        _adamw(weights, moments, mean, training, step)
        losses.append(value.item())
        step += 1
        reached = step % training.every == 0 or step == training.steps
        found = None
        if reached:
            seconds = time.monotonic() - started
            with _averaged(weights, mean):
                found = score() if score is not None else {}
            history.append({"step": step, "of": training.steps, "loss": sum(losses) / len(losses), "seconds": round(seconds, 1), **found})
            losses = []
            if checkpoint is not None:
                _save(checkpoint, signature, weights, moments, mean, step, history, seconds)
        on_progress(Progress(step, training.steps, value.item(), time.monotonic() - started, found))
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(mean[name])
    module.requires_grad_(False)
    return history


def _batch(texts: Sequence[Text], training: Training, step: int) -> list[Text]:
    """Texts with about `tokens` tokens of answers: those of the step's place in shuffled rounds through all of them."""
    answers = sum(len(text.tokens) - text.start for text in texts)
    a_round = max(1, round(answers / training.tokens))  # steps
    number, place = divmod(step, a_round)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(training.seed * 100_003 + number)).tolist()
    return [texts[i] for i in order[place::a_round]]


@torch.no_grad()
def _adamw(weights, moments, mean, training: Training, step: int) -> None:
    """AdamW (Loshchilov & Hutter 2019) with betas 0.9 and 0.95, gradients clipped to norm 1."""
    gradients = {name: w.grad for name, w in weights.items() if w.grad is not None}
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    clip, rate = min(1.0, 1.0 / (norm.item() + 1e-6)), training.rate(step)
    for name, gradient in gradients.items():
        weight, first, second = weights[name], moments[0][name], moments[1][name]
        gradient = gradient * clip
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient * gradient, 0.05)
        update = (first / (1 - 0.9 ** (step + 1))) / ((second / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
        if weight.dim() > 1:
            weight.mul_(1 - rate * training.weight_decay)
        weight.sub_(update, alpha=rate)
    keep = min(training.averaging, step / (step + 10))  # short at first
    for name, weight in weights.items():
        mean[name].lerp_(weight, 1 - keep)


class _averaged:
    """The averaged weights in place of the running ones, for a score."""

    def __init__(self, weights, mean):
        self.weights, self.mean = weights, mean

    def _swap(self):
        with torch.no_grad():
            for name, weight in self.weights.items():
                held = weight.detach().clone()
                weight.copy_(self.mean[name])
                self.mean[name].copy_(held)

    def __enter__(self):
        self._swap()

    def __exit__(self, *exc):
        self._swap()


def _save(path: Path, signature: str, weights, moments, mean, step: int, history: list, seconds: float) -> None:
    parts = {"weights": weights, "first": moments[0], "second": moments[1], "mean": mean}
    tensors = {f"{part}/{name}": tensor for part, held in parts.items() for name, tensor in held.items()}
    about = {"signature": signature, "step": str(step), "history": json.dumps(history), "seconds": str(seconds)}
    save_tensors(path, tensors, about)


def _load(path: Path, signature: str, weights, moments, mean) -> tuple[int, list, float]:
    with safe_open(path, "pt") as file:
        about = file.metadata() or {}
        if about.get("signature") != signature:
            raise BadRequest(f"{path.name} is a checkpoint of another training; name another file, or remove it to start afresh.")
        parts = {"weights": weights, "first": moments[0], "second": moments[1], "mean": mean}
        with torch.no_grad():
            for part, held in parts.items():
                for name, tensor in held.items():
                    tensor.copy_(file.get_tensor(f"{part}/{name}"))
        return int(about["step"]), json.loads(about["history"]), float(about["seconds"])
