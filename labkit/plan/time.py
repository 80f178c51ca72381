"""Predict the operations, bytes and time of a step from shapes; find break-even points.

A step passes `tokens` new tokens of each of `batch` rows through the model, after `past`
tokens in the cache. N = B * tokens:

    operations = 2 * N * weights used + 2 * B * V * E (head, last token only)
               + 4 * H * D * pairs (query, key seen)
    bytes      = weights once + cache read once per row + cache written
    seconds   >= max(bytes / bandwidth, operations / FLOP/s)     roofline, Williams et al. 2009

Decode (tokens = 1) does 2 operations per weight that it reads, so it is limited by
bytes. Prefill uses each weight N times, so it is limited by operations. At a batch in
between, both take equally long. `labkit.lab.plan.operator_times` predicts seconds from
measured operators instead of bounding them. When it loses: tiny models, for which
starting an operator costs more than its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from labkit.errors import BadRequest, Number, check_fields, whole_number
from labkit.plan.kv import LayerKV, kv_bytes
from labkit.plan.kv_formats import get_kv_format
from labkit.plan.shapes import Matrix, ModelShape
from labkit.plan.weights import matrix_bytes, planned_recipe


@dataclass(frozen=True)
class StepCost:
    """What one step computes and moves; `kv_bytes` are read and written."""

    operations: float
    weight_bytes: float
    kv_bytes: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte: the x axis of a roofline."""
        return self.operations / self.bytes

    def roofline_s(self, bandwidth: float, flops: float) -> float:
        """Return the shortest time at `bandwidth` bytes/s and `flops` operations/s."""
        return max(self.bytes / bandwidth, self.operations / flops)

    def bound_by(self, bandwidth: float, flops: float) -> str:
        """Return what takes longer: "memory" or "arithmetic"."""
        return "memory" if self.bytes / bandwidth >= self.operations / flops else "arithmetic"


def step_cost(
    model: ModelShape,
    batch: int = 1,
    tokens: int = 1,
    past: int = 0,
    recipe: str = "bf16",
    kv_format: str = "bf16",
) -> StepCost:
    """Return operations and bytes of one forward pass with logits of each row's last token."""
    whole_number(batch, "batch", 1)
    whole_number(tokens, "tokens", 1)
    whole_number(past, "past", 0)
    rows, kept = batch * tokens, past + tokens
    blocks = sum(matrix.active_parameters for matrix in model.part("blocks", "router"))
    operations = 2.0 * rows * blocks + 2.0 * batch * model.vocab_size * model.hidden_size
    read = 0.0
    for index, layer in enumerate(model.kv.layers):
        operations += batch * pair_operations(model, index) * pairs(layer, tokens, past)
        read += kv_bytes_read(model, index, kept, kv_format)
    before, after = (kv_bytes(model.kv, length, 1, kv_format) for length in (past, kept))
    weights = weight_bytes_read(model, rows, batch, recipe)
    return StepCost(operations, weights, batch * (read + after - before))


def pairs(layer: LayerKV, tokens: int, past: int) -> int:
    """Return the number of (query, key seen) pairs.

    Token t sees past + t + 1 keys, no more than the window and the sinks.
    """
    if layer.window is None:
        return tokens * past + tokens * (tokens + 1) // 2
    limit = layer.window + layer.sinks
    growing = min(tokens, max(0, limit - past))
    return growing * past + growing * (growing + 1) // 2 + (tokens - growing) * limit


def pair_operations(model: ModelShape, index: int) -> int:
    """Return 2 operations per number of a query-key product and of a weighted value, all heads."""
    layer = model.kv.layers[index]
    if layer.latent_dim is not None:  # MLA in the form that attends to the latent itself
        return 2 * model.num_heads * (2 * layer.latent_dim + layer.rope_dim)
    return 4 * model.num_heads * layer.head_dim


def kv_bytes_read(model: ModelShape, index: int, length: int, kv_format: str) -> float:
    """Return what layer `index` reads for one row; a layer that shares a cache still reads it."""
    layer = model.kv.layers[index]
    return float(layer.bytes(layer.tokens_held(length), get_kv_format(kv_format)))


def weight_bytes_read(model: ModelShape, rows: int, batch: int, recipe: str) -> float:
    """Return the bytes of weights that one step reads.

    Every weight is read once; of experts those that `rows` tokens reach; of the embedding
    only the rows looked up.
    """
    formats, total = planned_recipe(recipe), 0.0
    for matrix in model.matrices:
        size = matrix_bytes(matrix, formats, model.tied)
        if matrix.part != "embedding":
            total += size * share_reached(matrix, rows)
            continue
        total += min(rows, matrix.rows) * size / matrix.rows
        if model.tied and matrix.name == "embedding":  # it is the head as well
            total += size
    return total


def share_reached(matrix: Matrix, rows: int) -> float:
    """Return the share of the copies that `rows` tokens reach: 1 - (1 - active/count)^rows."""
    if matrix.active is None or matrix.active >= matrix.count:
        return 1.0
    return 1.0 - (1.0 - matrix.active / matrix.count) ** rows


def compute_bound_batch(
    model: ModelShape,
    bandwidth: float,
    flops: float,
    past: int = 0,
    recipe: str = "bf16",
    kv_format: str = "bf16",
) -> int | None:
    """Return the smallest batch at which a decode step is bound by arithmetic; None: no batch is.

    B * a / F >= (W + B * k) / bandwidth, with a operations and k cache bytes per row, and W
    weight bytes. With a long past, the cache of a row takes longer than its operations, and
    no batch helps.
    """
    one = step_cost(model, 1, 1, past, recipe, kv_format)
    gain = one.operations / flops - one.kv_bytes / bandwidth
    if gain <= 0:
        return None
    weights = one.weight_bytes
    if model.num_experts:
        weights = weight_bytes_read(model, model.vocab_size, 1, recipe)
    return max(1, ceil(weights / bandwidth / gain))


def money_per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """Return the price of a million tokens on a machine that is paid by the hour and always busy."""
    if tokens_per_s <= 0 or price_per_hour < 0:
        raise BadRequest(
            f"{tokens_per_s} tok/s at {price_per_hour} per hour has no price; "
            "give tokens_per_s above 0."
        )
    return price_per_hour / 3600 / tokens_per_s * 1e6


# ---- guess and verify (labkit.speculate) ----------------------------------------------------


@dataclass(frozen=True)
class SpeculationCosts:
    """What drafting costs, in plain target steps.

    `draft`: seconds of one drafted token / seconds of a plain step. `verify[i]`: a target
    pass over i + 1 tokens / a plain step, so verify[0] is 1; longer passes continue on the
    straight line from the first to the last. `fixed`: anything else that a pass costs.
    """

    draft: float = 0.0
    verify: tuple[float, ...] = (1.0, 1.05)
    fixed: float = 0.0

    def __post_init__(self):
        check_fields(self, draft=Number(0), fixed=Number(0))
        if not self.verify or min(self.verify) <= 0:
            raise BadRequest(f"verify is {self.verify}; give one or more numbers above 0.")

    def verify_ratio(self, tokens: int) -> float:
        """Return the cost of a target pass over `tokens` tokens."""
        last = len(self.verify)
        if tokens <= last:
            return self.verify[tokens - 1]
        slope = (self.verify[-1] - self.verify[0]) / (last - 1) if last > 1 else 0.0
        return self.verify[-1] + slope * (tokens - last)

    def pass_cost(self, length: int) -> float:
        """Return the cost of drafting `length` tokens and verifying them."""
        return length * self.draft + self.verify_ratio(length + 1) + (self.fixed if length else 0.0)


def expected_accepted_length(alpha: float, length: int) -> float:
    """Return the tokens per target pass: 1 + alpha + ... + alpha^length."""
    if not 0 <= alpha <= 1 or length < 0:
        raise BadRequest(
            f"alpha is {alpha} and the draft length {length}; "
            "give an alpha from 0 to 1 and a length of at least 0."
        )
    return length + 1.0 if alpha == 1 else (1 - alpha ** (length + 1)) / (1 - alpha)


def speculative_speedup(alpha: float, length: int, costs: SpeculationCosts) -> float:
    """Return plain time / speculative time for the same tokens; below 1 is a slowdown.

    Leviathan et al. (arXiv 2211.17192), with the actual cost of a verify pass.
    """
    return expected_accepted_length(alpha, length) / costs.pass_cost(length)


def best_draft_length(alpha: float, costs: SpeculationCosts, most: int = 16) -> int:
    """Return the length with the largest speed-up; 0 if drafting loses."""
    return max(range(most + 1), key=lambda length: speculative_speedup(alpha, length, costs))


def break_even_alpha(length: int, costs: SpeculationCosts) -> float | None:
    """Return the acceptance above which drafting `length` tokens pays; None if none is enough."""
    if speculative_speedup(1.0, length, costs) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if speculative_speedup(middle, length, costs) >= 1:
            high = middle
        else:
            low = middle
    return high
