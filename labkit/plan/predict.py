"""Seconds of prefill and decode, predicted from microbenchmarks of operators at this model's shapes.

    step = L * (products(rows) + glue(rows)) + sum over layers of attention(rows, keys seen) + head(batch) + rest
Each term is a curve measured on its own: random matrices of the model's shapes (never the model), attention over a
random cache, and the small operators between them. TTFT is the step of the whole prompt; TPOT is the mean
decode step over the tokens generated. No run of the model enters, so the prediction can be wrong.
When it loses: machines whose speed changes between the microbenchmark and the run; mixtures of experts (not offered).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import exp, log

from labkit.errors import BadRequest
from labkit.plan.shapes import ModelShape


@dataclass(frozen=True)
class Curve:
    """Seconds at a few sizes; straight lines in log-log between them, proportional above, constant below."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self):
        object.__setattr__(self, "points", tuple(sorted(self.points)))
        if not self.points or any(x <= 0 or y <= 0 for x, y in self.points):
            raise BadRequest(f"a curve of {len(self.points)} points needs at least one, all above 0.")

    def __call__(self, size: float) -> float:
        points = self.points
        if size <= points[0][0]:
            return points[0][1]
        if size >= points[-1][0]:
            return points[-1][1] * size / points[-1][0]
        i = bisect_left(points, (size,))
        (x0, y0), (x1, y1) = points[i - 1], points[i]
        share = (log(size) - log(x0)) / (log(x1) - log(x0))
        return exp(log(y0) + share * (log(y1) - log(y0)))


@dataclass(frozen=True)
class OperatorTimes:
    """Measured constants for one model shape, dtype, device and thread count. Sizes are rows unless said."""

    products: Curve                        # the matrix products of one layer
    head: Curve                            # the product with the vocabulary
    glue: Curve                            # norms, rotation, activation and residuals of one layer
    decode_attention: dict[int, Curve]     # batch -> seconds over keys held, one layer, append included
    prefill_attention: Curve               # seconds of one row over its tokens, one layer, append included
    step: Curve                            # once a step: embedding, positions, final norm, choosing the token

    def attention(self, batch: int, tokens: int, keys: float) -> float:
        if tokens > 1:
            return batch * self.prefill_attention(tokens)
        by_batch = Curve(tuple((b, curve(max(keys, 1))) for b, curve in self.decode_attention.items()))
        return by_batch(batch)


@dataclass(frozen=True)
class Prediction:
    ttft_s: float
    tpot_s: float
    parts_s: dict[str, float]              # of one decode step, at the middle of the generation

    @property
    def tok_s(self) -> float:
        return 1 / self.tpot_s


def predict(model: ModelShape, times: OperatorTimes, *, batch: int = 1, prompt_tokens: int = 128,
            new_tokens: int = 128) -> Prediction:
    """TTFT and TPOT of `batch` rows. TPOT is that of a row: the batch gives `batch` tokens in that time."""
    prefill = sum(step_parts(model, times, batch, prompt_tokens, 0).values())
    # Attention is near enough to linear in the keys that the middle of the generation stands for its mean.
    parts = step_parts(model, times, batch, 1, prompt_tokens + (new_tokens - 1) / 2)
    return Prediction(prefill, sum(parts.values()), parts)


def step_parts(model: ModelShape, times: OperatorTimes, batch: int, tokens: int, past: float) -> dict[str, float]:
    """Seconds of each kind of operator in one step."""
    rows = batch * tokens
    attention = 0.0
    for layer in model.kv.layers:
        keys = past + 1 if layer.window is None else min(past + 1, layer.window + layer.sinks)
        attention += times.attention(batch, tokens, keys)
    return {"products": model.num_layers * times.products(rows), "glue": model.num_layers * times.glue(rows),
            "attention": attention, "head": times.head(batch), "step": times.step(rows)}


def fused_products(model: ModelShape) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of the products of the first layer as labkit runs them: q|k|v as one, gate|up as one."""
    if model.num_experts or model.kv.layers[0].latent_dim is not None:
        raise BadRequest(f"{model.name} has experts or latent attention, whose seconds are not predicted; "
                         "its operations, bytes and roofline are.")
    by_name = {matrix.name: matrix for matrix in model.part("blocks") if matrix.layer == 0}
    groups = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
    return tuple((sum(by_name[name].rows for name in group if name in by_name), by_name[group[-1]].columns)
                 for group in groups)
