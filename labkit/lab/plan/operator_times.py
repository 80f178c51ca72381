"""Predict seconds of prefill and decode from microbenchmarks of operators.

    step = L * (products(rows) + glue(rows)) + sum over layers of attention(rows, keys)
         + head(batch) + rest

Each term is a curve that was measured on its own: random matrices of the model's shapes
(never the model), attention over a random cache, and the small operators between them.
TTFT is the step of the whole prompt; TPOT is the mean decode step over the generated
tokens. The prediction uses no run of the model, so a run can refute it. Limitation: the
speed of the machine must not change between the microbenchmark and the run. Mixtures of
experts are not supported.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import exp, log

from labkit.errors import BadRequest
from labkit.plan.shapes import ModelShape


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of size, from a few measured sizes.

    Between two sizes it is a straight line in log-log, above the largest proportional
    to size, and below the smallest constant.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self):
        object.__setattr__(self, "points", tuple(sorted(self.points)))
        if not self.points or any(x <= 0 or y <= 0 for x, y in self.points):
            raise BadRequest(
                f"The points of the curve are {self.points}; give at least one, all above 0."
            )

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
    """Measured times for one model shape, dtype, device and number of threads.

    Sizes are rows unless a comment says otherwise.
    """

    products: Curve  # the matrix products of one layer
    head: Curve  # the product with the vocabulary
    glue: Curve  # norms, rotation, activation and residuals of one layer
    # batch -> seconds over cached keys, one layer, append included
    decode_attention: dict[int, Curve]
    prefill_attention: Curve  # seconds of one row over its tokens, one layer, append included
    step: Curve  # once per step: embedding, positions, final norm, choosing the token

    def attention(self, batch: int, tokens: int, keys: float) -> float:
        if tokens > 1:
            return batch * self.prefill_attention(tokens)
        by_batch = Curve(
            tuple((b, curve(max(keys, 1))) for b, curve in self.decode_attention.items())
        )
        return by_batch(batch)


@dataclass(frozen=True)
class Prediction:
    ttft_s: float
    tpot_s: float
    parts_s: dict[str, float]  # of one decode step, at the middle of the generation

    @property
    def tok_s(self) -> float:
        return 1 / self.tpot_s


def predict(
    model: ModelShape,
    times: OperatorTimes,
    *,
    batch: int = 1,
    prompt_tokens: int = 128,
    new_tokens: int = 128,
) -> Prediction:
    """Return TTFT and TPOT of `batch` rows; one TPOT gives one token per row."""
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
    """Return (rows, columns) of a layer's products; q|k|v and gate|up are fused."""
    if model.num_experts or model.kv.layers[0].latent_dim is not None:
        raise BadRequest(
            f"{model.name} has experts or latent attention, whose seconds cannot be predicted; "
            "use its operations, bytes and roofline."
        )
    by_name = {matrix.name: matrix for matrix in model.part("blocks") if matrix.layer == 0}
    groups = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
    return tuple(
        (sum(by_name[name].rows for name in group if name in by_name), by_name[group[-1]].columns)
        for group in groups
    )
