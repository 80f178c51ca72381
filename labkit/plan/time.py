"""Predict operations, bytes and time of a step from shapes, and find break-even points.

A step passes `tokens` new tokens of each of `batch` rows through the model. The cache
has `past` tokens per row. With N = B * tokens:

    operations = 2 * N * weights used + 2 * B * V * E (head, last token only)
               + 4 * H * D * pairs (query, visible key)
    bytes      = weights once + cache read once per row + cache written
    seconds   >= max(bytes / bandwidth, operations / FLOP/s)     roofline, Williams et al. 2009

Decode (tokens = 1) does 2 operations per weight that it reads, so bytes limit it.
Prefill uses each weight N times, so operations limit it. At some batch size both take
equally long. `labkit.lab.plan.operator_times` predicts the seconds themselves, from
measured operators. When it loses: for tiny models, starting an operator takes longer
than reading its bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil

from labkit.errors import BadRequest, Number, check_fields, whole_number
from labkit.plan.kv import LayerKV, kv_bytes
from labkit.plan.kv_formats import get_kv_format
from labkit.plan.shapes import Matrix, ModelShape
from labkit.plan.weights import matrix_bytes, planned_recipe


@dataclass(frozen=True)
class StepCost:
    """The operations of one step and its bytes; `kv_bytes` are those read and written."""

    operations: float
    weight_bytes: float
    kv_bytes: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte, the x axis of a roofline."""
        return self.operations / self.bytes

    def roofline_s(self, bandwidth: float, flops: float) -> float:
        """Return the shortest possible time at `bandwidth` bytes/s and `flops` FLOP/s."""
        return max(self.bytes / bandwidth, self.operations / flops)


def step_cost(
    model: ModelShape,
    batch: int = 1,
    tokens: int = 1,
    past: int = 0,
    recipe: str = "bf16",
    kv_format: str = "bf16",
) -> StepCost:
    """Return the cost of one forward pass with logits for the last token of each row."""
    whole_number(batch, "batch", 1)
    whole_number(tokens, "tokens", 1)
    whole_number(past, "past", 0)
    rows, length = batch * tokens, past + tokens
    blocks = sum(matrix.active_parameters for matrix in model.part("blocks", "router"))
    operations = 2.0 * rows * blocks + 2.0 * batch * model.vocab_size * model.hidden_size
    for layer in model.kv.layers:
        operations += batch * pair_operations(model, layer) * pairs(layer, tokens, past)
    read = sum(kv_bytes_read(layer, length, kv_format) for layer in model.kv.layers)
    before, after = (kv_bytes(model.kv, count, 1, kv_format) for count in (past, length))
    weights = weight_bytes_read(model, rows, recipe)
    return StepCost(operations, weights, batch * (read + after - before))


def pairs(layer: LayerKV, tokens: int, past: int) -> int:
    """Return the number of pairs (query, visible key) of one row.

    Token t sees past + t + 1 keys, limited by the window and the sinks.
    """
    if layer.window is None:
        return tokens * past + tokens * (tokens + 1) // 2
    limit = layer.window + layer.sinks
    growing = min(tokens, max(0, limit - past))
    return growing * past + growing * (growing + 1) // 2 + (tokens - growing) * limit


def pair_operations(model: ModelShape, layer: LayerKV) -> int:
    """Return the operations per pair: 2 per number of a key, and 2 per number of a value."""
    if layer.latent_dim is not None:  # MLA in the form that attends to the latent itself
        return 2 * model.num_heads * (2 * layer.latent_dim + layer.rope_dim)
    return 4 * model.num_heads * layer.head_dim


def kv_bytes_read(layer: LayerKV, length: int, kv_format: str) -> float:
    """Return the bytes that a layer reads for one row, also from the cache of another layer."""
    return float(layer.bytes(layer.stored_tokens(length), get_kv_format(kv_format)))


def weight_bytes_read(model: ModelShape, rows: int, recipe: str) -> float:
    """Return the bytes of weights that one step of `rows` tokens reads.

    It reads each weight once, but of the experts only those that a token uses, and of
    the embedding only one row per token.
    """
    formats, total = planned_recipe(recipe), 0.0
    for matrix in model.matrices:
        size = matrix_bytes(matrix, formats, model.tied)
        if matrix.part != "embedding":
            total += size * share_in_use(matrix, rows)
            continue
        total += min(rows, matrix.rows) * size / matrix.rows
        if model.tied and matrix.name == "embedding":  # it is the head as well
            total += size
    return total


def share_in_use(matrix: Matrix, rows: int) -> float:
    """Return the expected share of experts in use: 1 - (1 - active/count)^rows."""
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
    """Return the smallest batch whose decode step is limited by arithmetic, or None.

    The condition is B * a / flops >= (W + B * k) / bandwidth, with a operations and k
    bytes of cache per row, and W bytes of weights. After a long past, reading the cache
    of a row takes longer than its operations. Then no batch meets the condition.
    """
    one = step_cost(model, 1, 1, past, recipe, kv_format)
    gain = one.operations / flops - one.kv_bytes / bandwidth
    if gain <= 0:
        return None
    weights = one.weight_bytes
    if model.num_experts:
        weights = weight_bytes_read(model, model.vocab_size, recipe)
    return max(1, ceil(weights / bandwidth / gain))


def money_per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """Return the price of a million tokens on a machine that is always busy."""
    if tokens_per_s <= 0 or price_per_hour < 0:
        raise BadRequest(
            f"{tokens_per_s} tok/s at {price_per_hour} per hour is not valid; give a speed above 0 "
            "and a price of at least 0."
        )
    return price_per_hour / 3600 / tokens_per_s * 1e6


# ---- Speculative decoding (labkit.speculate) -------------------------------------------------


@dataclass(frozen=True)
class SpeculationCosts:
    """The costs of drafting and verifying; the unit is the time of a plain step.

    `draft`: the cost of one drafted token. `verify[i]`: the cost of a target pass over
    i + 1 tokens, so verify[0] is 1. For longer passes, the straight line through the
    first and the last is continued. `fixed`: other costs per pass.
    """

    draft: float = 0.0
    verify: tuple[float, ...] = (1.0, 1.05)
    fixed: float = 0.0

    def __post_init__(self):
        check_fields(self, draft=Number(0), fixed=Number(0))
        if not self.verify or min(self.verify) <= 0:
            raise BadRequest(f"verify is {self.verify}; give at least one number, all above 0.")

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
    """Return the mean tokens per target pass: 1 + alpha + ... + alpha^length."""
    if not 0 <= alpha <= 1:
        raise BadRequest(f"alpha is {alpha}; give a number from 0 to 1.")
    whole_number(length, "length", 0)
    return length + 1.0 if alpha == 1 else (1 - alpha ** (length + 1)) / (1 - alpha)


def speculative_speedup(alpha: float, length: int, costs: SpeculationCosts) -> float:
    """Return plain time / speculative time for the same tokens; below 1 it is slower.

    Source: Leviathan et al. (arXiv 2211.17192), here with the real cost of a verify
    pass.
    """
    return expected_accepted_length(alpha, length) / costs.pass_cost(length)


def best_draft_length(alpha: float, costs: SpeculationCosts, most: int = 16) -> int:
    """Return the draft length with the largest speedup; 0 if no length gains."""
    return max(range(most + 1), key=lambda length: speculative_speedup(alpha, length, costs))


def break_even_alpha(length: int, costs: SpeculationCosts) -> float | None:
    """Return the smallest acceptance rate at which drafting `length` tokens is not slower.

    Returns None if even a rate of 1 is too low.
    """
    steps = 2**40  # of alpha
    pays = lambda i: speculative_speedup(i / steps, length, costs) >= 1  # noqa: E731
    first = bisect_left(range(steps + 1), True, key=pays)
    return None if first > steps else first / steps
