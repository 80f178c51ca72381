"""Predict seconds of prefill and decode from microbenchmarks of operators.

    step = L * (products(rows) + glue(rows)) + sum over layers of attention(rows, keys)
         + head(batch) + rest

Each term is a curve that is measured alone: products with random matrices of the
model's shapes, attention over a random cache, and the small operators between them.
TTFT is the time of the step with the whole prompt. TPOT is the mean time of the decode
steps. The prediction does not run the model, so a run can show that it is wrong.
Limitation: the machine must have the same speed in the microbenchmark and in the run.
Mixtures of experts are not supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log

import numpy as np

from labkit.errors import BadRequest
from labkit.plan.shapes import ModelShape


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of size, from a few measured (size, seconds).

    Between two points the curve is a straight line in log-log scale. Below the smallest
    size it is constant, and above the largest size it is proportional to the size.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self):
        object.__setattr__(self, "points", tuple(sorted(self.points)))
        if not self.points or min(map(min, self.points)) <= 0:
            raise BadRequest(f"points is {self.points}; give pairs of numbers above 0.")

    def __call__(self, size: float) -> float:
        sizes, seconds = np.array(self.points).T
        inside = exp(np.interp(log(size), np.log(sizes), np.log(seconds)))
        return inside * max(1.0, size / self.points[-1][0])


@dataclass(frozen=True)
class OperatorTimes:
    """Measured times for one model shape, dtype, device and number of threads.

    The size in a curve is the number of rows, unless a comment names another.
    """

    products: Curve  # the matrix products of one layer
    head: Curve  # the product with the vocabulary
    glue: Curve  # norms, rotation, activation and residuals of one layer
    # Attention of one layer, append included. Decode: batch -> curve over the cached keys.
    decode_attention: dict[int, Curve]
    prefill_attention: Curve  # of one row, over its number of tokens
    step: Curve  # once per step: embedding, positions, final norm, choosing the token

    def attention(self, batch: int, tokens: int, keys: float) -> float:
        """Return the seconds of one layer's attention for `batch` rows of `tokens` tokens."""
        if tokens > 1:
            return batch * self.prefill_attention(tokens)
        points = ((b, curve(max(keys, 1))) for b, curve in self.decode_attention.items())
        return Curve(tuple(points))(batch)


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of prefill (TTFT) and of a mean decode step (TPOT)."""

    ttft_s: float
    tpot_s: float
    parts_s: dict[str, float]  # of one decode step, at the middle of the generation


def predict(
    model: ModelShape,
    times: OperatorTimes,
    *,
    batch: int = 1,
    prompt_tokens: int = 128,
    new_tokens: int = 128,
) -> Prediction:
    """Return TTFT and TPOT of `batch` rows; each decode step makes one token per row."""
    prefill = sum(step_parts(model, times, batch, prompt_tokens, 0).values())
    # Attention is almost linear in the keys, so the middle of the generation gives its mean.
    parts = step_parts(model, times, batch, 1, prompt_tokens + (new_tokens - 1) / 2)
    return Prediction(prefill, sum(parts.values()), parts)


def step_parts(
    model: ModelShape, times: OperatorTimes, batch: int, tokens: int, past: float
) -> dict[str, float]:
    """Return the seconds of each kind of operator in one step."""
    rows = batch * tokens
    attention = 0.0
    for layer in model.kv.layers:
        keys = past + 1 if layer.window is None else min(past + 1, layer.window + layer.sinks)
        attention += times.attention(batch, tokens, keys)
    return {
        "products": model.num_layers * times.products(rows),
        "glue": model.num_layers * times.glue(rows),
        "attention": attention,
        "head": times.head(batch),
        "step": times.step(rows),
    }


def fused_products(model: ModelShape) -> tuple[tuple[int, int], ...]:
    """Return (rows, columns) of a layer's matrices: q|k|v, o, gate|up, down.

    Raises BadRequest for a model with experts or latent attention.
    """
    if model.num_experts or model.kv.layers[0].latent_dim is not None:
        raise BadRequest(
            f"{model.name} has experts or latent attention, which operator times do not support; "
            "give another model."
        )
    sizes = {m.name: (m.rows, m.columns) for m in model.part("blocks") if m.layer == 0}
    groups = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
    fused = ([sizes[name] for name in group if name in sizes] for group in groups)
    return tuple((sum(rows for rows, _ in parts), parts[0][1]) for parts in fused)
