"""Train a draft with checkpoints: a resumed run gives the same weights.

The seed and the step number choose the texts of a step. A step therefore depends only
on the weights, the optimizer's state and the running mean of the weights. A checkpoint,
a safetensors file, stores all three. The result of the training is the running mean,
which is steadier than the weights after the last step (Polyak averaging).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from labkit.errors import BadRequest, Number, Whole, check_fields
from labkit.files import save_tensors
from labkit.lab.distill.corpus import Text


@dataclass(frozen=True)
class Training:
    """The settings of a training run.

    A step reads about `tokens` tokens of answers. The learning rate rises over `warmup`
    steps, stays constant, and falls to 0 over the last quarter of the steps. A
    checkpoint from before the last quarter can continue with more steps. `averaging` is
    the decay of the running mean per step, and `every` is the number of steps between
    checkpoints. Raises BadRequest if a setting is not valid.
    """

    steps: int = 1500
    tokens: int = 2048
    learning_rate: float = 1e-3
    warmup: int = 50
    weight_decay: float = 0.01
    averaging: float = 0.98
    seed: int = 0
    every: int = 100

    def __post_init__(self):
        check_fields(self, steps=Whole(1), tokens=Whole(1), every=Whole(1), warmup=Whole(0))
        check_fields(self, learning_rate=Number(above=0), averaging=Number(0, below=1))

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        rise, fall = (step + 1) / max(self.warmup, 1), (self.steps - step) / (self.steps / 4)
        return self.learning_rate * min(1.0, rise, fall)


@dataclass(frozen=True)
class Progress:
    """A report after one step. `score` is None between two checkpoints."""

    step: int
    steps: int
    loss: float
    seconds: float
    score: dict[str, float] | None = None


@dataclass
class _State:
    """The state of a run. A checkpoint stores all of it."""

    weights: dict[str, Tensor]
    training: Training
    signature: str
    step: int = 0
    history: list[dict] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self):
        self.parameters = nn.ParameterList(self.weights.values())
        matrices = [weight for weight in self.parameters if weight.dim() > 1]
        vectors = [weight for weight in self.parameters if weight.dim() <= 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        decay = self.training.weight_decay
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=decay)
        self.mean = AveragedModel(self.parameters, multi_avg_fn=self._average)

    def _average(self, mean, weights, count) -> None:
        """Update the exponential moving average, which spans fewer steps at first."""
        decay = min(self.training.averaging, int(count) / (int(count) + 10))
        get_ema_multi_avg_fn(decay)(mean, weights, count)

    def update(self, loss: Tensor) -> None:
        """Take one AdamW step on `loss`, with gradients clipped to norm 1."""
        self.optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(self.parameters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.rate(self.step)
        self.optimizer.step()
        self.mean.update_parameters(self.parameters)
        self.step += 1

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and their running mean."""
        for weight, mean in zip(self.parameters, self.mean.module):
            value = weight.clone()
            weight.copy_(mean)
            mean.copy_(value)

    def save(self, path: Path) -> None:
        groups = {"weights": self.weights, "mean": self.mean.state_dict()}
        for number, moments in self.optimizer.state_dict()["state"].items():
            groups[f"optimizer/{number}"] = moments
        tensors = {
            f"{group}/{name}": tensor
            for group, members in groups.items()
            for name, tensor in members.items()
        }
        notes = {"step": self.step, "history": self.history, "seconds": self.seconds}
        save_tensors(path, tensors, {"signature": self.signature, "notes": json.dumps(notes)})

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Load a checkpoint. Raises BadRequest if this run cannot continue it."""
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}

        def group(prefix: str) -> dict[str, Tensor]:
            keys = [key for key in tensors if key.startswith(prefix)]
            return {key.removeprefix(prefix): tensors[key] for key in keys}

        if about.get("signature") != self.signature:
            raise BadRequest(
                f"{path.name} is a checkpoint of another training; remove it or use another file."
            )
        for name, value in json.loads(about["notes"]).items():
            setattr(self, name, value)
        before, steps = self.history[-1]["of"], self.training.steps
        if before != steps and self.step > 0.75 * min(before, steps):
            raise BadRequest(
                f"{path.name} is at step {self.step} of {before}, too late to continue to {steps} "
                "steps; remove it to start again."
            )
        for name, weight in group("weights/").items():
            self.weights[name].copy_(weight)
        self.mean.load_state_dict(group("mean/"))
        moments = {i: group(f"optimizer/{i}/") for i in range(len(self.weights))}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})


def fit(
    module: nn.Module,
    texts: Sequence[Text],
    loss: Callable[[Sequence[Text]], Tensor],
    training: Training,
    checkpoint: Path | None = None,
    score: Callable[[], dict[str, float]] = dict,
    on_progress: Callable[[Progress], object] = lambda progress: None,
) -> list[dict]:
    """Train `module` in place on `loss(texts of a step)`.

    Returns one entry per checkpoint: {step, of, loss, seconds, and the values of
    `score`}. `checkpoint` is the file to write to and to continue from. Raises
    BadRequest if it belongs to another training, if no text has an answer of five
    tokens, or if the loss is not finite.
    """
    texts = [text for text in texts if len(text.tokens) - text.start > 4]
    if not texts:
        raise BadRequest("No text has an answer of five tokens or more; give longer texts.")
    parameters = module.named_parameters()
    weights = {name: w.requires_grad_() for name, w in parameters if w.dtype.is_floating_point}
    size = [len(texts), sum(len(text.tokens) for text in texts)]
    state = _State(weights, training, json.dumps([asdict(training) | {"steps": None}, *size]))
    if checkpoint is not None and checkpoint.is_file():
        state.load(checkpoint)
    started, losses = time.monotonic() - state.seconds, []
    while state.step < training.steps:
        value = loss(_batch(texts, training, state.step))
        if not torch.isfinite(value):
            place = f"The loss is {value.item()} at step {state.step}"
            raise BadRequest(f"{place}; lower the learning rate ({training.learning_rate}).")
        state.update(value)
        losses.append(value.item())
        scores, state.seconds = None, time.monotonic() - started
        if state.step % training.every == 0 or state.step == training.steps:
            state.swap()
            scores = score()
            state.swap()
            entry = {"step": state.step, "of": training.steps, "loss": sum(losses) / len(losses)}
            state.history.append({**entry, "seconds": round(state.seconds, 1), **scores})
            losses = []
            if checkpoint is not None:
                state.save(checkpoint)
        on_progress(Progress(state.step, training.steps, value.item(), state.seconds, scores))
    state.swap()
    module.requires_grad_(False)
    return state.history


def _batch(texts: Sequence[Text], training: Training, step: int) -> list[Text]:
    """Return the texts of a step, about `tokens` tokens of answers.

    Each round over all texts has its own order, and the steps of a round share it.
    """
    answers = sum(len(text.tokens) - text.start for text in texts)
    round_steps = max(1, round(answers / training.tokens))
    number, place = divmod(step, round_steps)
    generator = torch.Generator().manual_seed(training.seed * 100_003 + number)
    order = torch.randperm(len(texts), generator=generator).tolist()
    return [texts[i] for i in order[place::round_steps]]
