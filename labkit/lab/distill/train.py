"""Train a draft so that the run can be killed at any line and gives the same weights after a resume.

The order of texts is a function of the seed and the step, so a step depends only on the
weights, the optimizer's state and the running mean of the weights; all of them are in the
checkpoint, a safetensors file. The result is that running mean: it is steadier than the last
step (Polyak averaging).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from labkit.errors import BadRequest
from labkit.files import save_tensors
from labkit.lab.distill.corpus import Text


@dataclass(frozen=True)
class Training:
    """How to train.

    A step reads about `tokens` tokens of answers. The learning rate rises over `warmup` steps,
    stays, and falls to 0 over the last quarter. A checkpoint from before that quarter can
    continue to more steps. `averaging` is the decay of the running mean per step, and `every`
    the number of steps between checkpoints.
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
        whole = min(self.steps, self.tokens, self.every) >= 1 and self.warmup >= 0
        if not whole or self.learning_rate <= 0 or not 0 <= self.averaging < 1:
            raise BadRequest(
                f"{self} is not valid; steps, tokens and every are at least 1, warmup at least 0, "
                "learning_rate is above 0, and averaging from 0 to below 1."
            )

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        rise, fall = (step + 1) / max(self.warmup, 1), (self.steps - step) / (self.steps / 4)
        return self.learning_rate * min(1.0, rise, fall)


@dataclass(frozen=True)
class Progress:
    """One report; `score` is None between two checkpoints."""

    step: int
    steps: int
    loss: float
    seconds: float
    score: dict[str, float] | None = None


@dataclass
class _State:
    """Everything that a resume needs."""

    weights: dict[str, Tensor]
    training: Training
    signature: str
    step: int = 0
    history: list[dict] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self):
        decayed = [weight for weight in self.weights.values() if weight.dim() > 1]
        plain = [weight for weight in self.weights.values() if weight.dim() <= 1]
        groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        decay = self.training.weight_decay
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=decay)
        self.parameters = nn.ParameterList(self.weights.values())
        self.mean = AveragedModel(self.parameters, multi_avg_fn=self._average)

    def _average(self, mean, weights, count) -> None:
        """Exponential moving average, over fewer steps at first."""
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
    def use_mean(self) -> list[Tensor]:
        """Put the running mean in place of the weights; return copies of the weights."""
        weights = [weight.clone() for weight in self.parameters]
        for weight, mean in zip(self.parameters, self.mean.module):
            weight.copy_(mean)
        return weights

    @contextmanager
    def averaged(self):
        """Use the running mean inside the block, for a score."""
        weights = self.use_mean()
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, value in zip(self.parameters, weights):
                    weight.copy_(value)

    def save(self, path: Path) -> None:
        tensors = {f"weights/{name}": weight for name, weight in self.weights.items()}
        tensors |= {f"mean/{name}": mean for name, mean in self.mean.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{number}/{key}": value for key, value in values.items()}
        notes = {"step": self.step, "history": self.history, "seconds": self.seconds}
        about = {"signature": self.signature, "notes": json.dumps(notes)}
        save_tensors(path, tensors, about)

    def load(self, path: Path) -> None:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("signature") != self.signature:
                raise BadRequest(
                    f"{path.name} is a checkpoint of another training; name another file, or "
                    "remove it to start again."
                )
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(tensors[f"weights/{name}"])
        names = self.mean.state_dict()
        self.mean.load_state_dict({name: tensors[f"mean/{name}"] for name in names})
        moments: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            if key.startswith("optimizer/"):
                _, number, name = key.split("/")
                moments.setdefault(int(number), {})[name] = tensor
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})
        notes = json.loads(about["notes"])
        self.step, self.history = notes["step"], notes["history"]
        self.seconds = notes["seconds"]


def fit(
    module: nn.Module,
    texts: Sequence[Text],
    loss: Callable[[Sequence[Text]], Tensor],
    training: Training,
    checkpoint: Path | None = None,
    score: Callable[[], dict[str, float]] | None = None,
    on_progress: Callable[[Progress], object] = lambda progress: None,
) -> list[dict]:
    """Train `module` in place on `loss(some texts)`; return the scores [{step, loss, seconds, …}].

    `checkpoint` is a file to write to and to continue from. Raises BadRequest if it belongs to
    another training or if the loss is not finite.
    """
    texts = [text for text in texts if len(text.tokens) - text.start > 4]
    if not texts:
        raise BadRequest(
            "There is nothing to train on: no text has an answer of more than four tokens."
        )
    parameters = module.named_parameters()
    weights = {name: w.requires_grad_() for name, w in parameters if w.dtype.is_floating_point}
    size = [len(texts), sum(len(text.tokens) for text in texts)]
    state = _State(weights, training, json.dumps([asdict(training) | {"steps": None}, *size]))
    if checkpoint is not None and checkpoint.is_file():
        state.load(checkpoint)
        _check_reach(state, checkpoint)
    started, losses = time.monotonic() - state.seconds, []
    while state.step < training.steps:
        value = loss(_batch(texts, training, state.step))
        if not torch.isfinite(value):
            raise BadRequest(
                f"The loss is {value.item()} at step {state.step}; lower the learning rate "
                f"({training.learning_rate})."
            )
        state.update(value)
        losses.append(value.item())
        scores = None
        state.seconds = time.monotonic() - started
        if state.step % training.every == 0 or state.step == training.steps:
            with state.averaged():
                scores = score() if score is not None else {}
            average = sum(losses) / len(losses)
            entry = {"step": state.step, "of": training.steps, "loss": average}
            state.history.append({**entry, "seconds": round(state.seconds, 1), **scores})
            losses = []
            if checkpoint is not None:
                state.save(checkpoint)
        on_progress(Progress(state.step, training.steps, value.item(), state.seconds, scores))
    state.use_mean()
    module.requires_grad_(False)
    return state.history


def _check_reach(state: _State, checkpoint: Path) -> None:
    before, steps = state.history[-1]["of"], state.training.steps
    if before != steps and state.step > 0.75 * min(before, steps):
        raise BadRequest(
            f"{checkpoint.name} is at step {state.step} of {before}, too late to continue to "
            f"{steps} steps; remove it to start again."
        )


def _batch(texts: Sequence[Text], training: Training, step: int) -> list[Text]:
    """Return texts with about `tokens` tokens of answers: the step's share of a shuffled round."""
    answers = sum(len(text.tokens) - text.start for text in texts)
    round_steps = max(1, round(answers / training.tokens))
    number, place = divmod(step, round_steps)
    generator = torch.Generator().manual_seed(training.seed * 100_003 + number)
    order = torch.randperm(len(texts), generator=generator).tolist()
    return [texts[i] for i in order[place::round_steps]]
