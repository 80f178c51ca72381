"""Where the time of a step goes: operations and bytes counted from shapes, the roofline, and the break-even batch.

A step passes `tokens` new tokens of each of `batch` rows through the model, after `past` tokens in the cache:
    operations = 2 * N * weights used + 2 * B * V * E (head, last token only) + 4 * H * D * pairs (query, key seen)
    bytes      = weights once + cache read once a row + cache written          N = B * tokens
    seconds   >= max(bytes / bandwidth, operations / FLOP/s)                   roofline, Williams et al. 2009
Decode (tokens = 1) reads all weights for 2 operations each, so bytes decide; prefill reuses each weight N times,
so operations do. Between them lies the batch where the two are equal. Predicting seconds from measured
operators, rather than bounding them, is `labkit.plan.predict`.
When it loses: tiny models, where starting an operator costs more than its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from labkit.errors import BadRequest
from labkit.plan.kv import LayerKV, kv_bytes
from labkit.plan.shapes import Matrix, ModelShape
from labkit.plan.weights import matrix_bytes, planned_recipe


@dataclass(frozen=True)
class StepCost:
    operations: float
    weight_bytes: float
    kv_bytes: float                       # read and written

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte: the x axis of a roofline."""
        return self.operations / self.bytes

    def roofline_s(self, bandwidth: float, flops: float) -> float:
        """The least this step can take at `bandwidth` bytes/s and `flops` operations/s."""
        return max(self.bytes / bandwidth, self.operations / flops)

    def bound_by(self, bandwidth: float, flops: float) -> str:
        return "memory" if self.bytes / bandwidth >= self.operations / flops else "arithmetic"


def step_cost(model: ModelShape, batch: int = 1, tokens: int = 1, past: int = 0, recipe: str = "bf16",
              kv_format: str = "bf16") -> StepCost:
    """Operations and bytes of one forward pass; logits are wanted for the last token of each row."""
    if batch < 1 or tokens < 1 or past < 0:
        raise BadRequest(f"a step of {tokens} tokens in {batch} rows after {past} cannot be counted; "
                         "give at least 1 token and 1 row, after 0 or more.")
    rows = batch * tokens
    blocks = sum(matrix.active_parameters for matrix in model.part("blocks", "router"))
    operations = 2.0 * rows * blocks + 2.0 * batch * model.vocab_size * model.hidden_size
    for index, layer in enumerate(model.kv.layers):
        operations += batch * pair_operations(model, index) * pairs(layer, tokens, past)
    read = sum(kv_bytes_read(model, index, past + tokens, kv_format) for index in range(model.num_layers))
    written = kv_bytes(model.kv, past + tokens, 1, kv_format) - kv_bytes(model.kv, past, 1, kv_format)
    return StepCost(operations, weight_bytes_read(model, rows, batch, recipe), batch * (read + written))


def pairs(layer: LayerKV, tokens: int, past: int) -> int:
    """How many (query, key seen) pairs there are: token t sees past + t + 1 keys, at most the window and the sinks."""
    if layer.window is None:
        return tokens * past + tokens * (tokens + 1) // 2
    limit = layer.window + layer.sinks
    growing = min(tokens, max(0, limit - past))
    return growing * past + growing * (growing + 1) // 2 + (tokens - growing) * limit


def pair_operations(model: ModelShape, index: int) -> int:
    """2 for each number of a query-key product and 2 for each number of a weighted value, in all H heads."""
    layer = model.kv.layers[index]
    if layer.latent_dim is not None:              # MLA in the form that attends to the latent itself
        return 2 * model.num_heads * (2 * layer.latent_dim + layer.rope_dim)
    return 4 * model.num_heads * layer.head_dim


def kv_bytes_read(model: ModelShape, index: int, length: int, kv_format: str) -> float:
    """What layer `index` reads for one row; a layer that shares a cache still reads it."""
    from labkit.plan.kv_formats import get_kv_format
    layer = model.kv.layers[index]
    return float(layer.bytes(layer.tokens_held(length), get_kv_format(kv_format)))


def weight_bytes_read(model: ModelShape, rows: int, batch: int, recipe: str) -> float:
    """Every weight once; of experts those that `rows` tokens reach; of the embedding only the rows looked up."""
    formats = planned_recipe(recipe)
    total = 0.0
    for matrix in model.matrices:
        if matrix.part == "embedding":
            size = matrix_bytes(matrix, formats, model.tied)
            looked_up = min(rows, matrix.rows) * size / matrix.rows
            is_head = model.tied and matrix.name == "embedding"
            total += looked_up + (size if is_head else 0)
        else:
            total += matrix_bytes(matrix, formats, model.tied) * share_reached(matrix, rows)
    return total


def share_reached(matrix: Matrix, rows: int) -> float:
    """Share of the copies that `rows` tokens touch, each choosing `active` of `count` evenly: 1 - (1 - a/n)^rows."""
    if matrix.active is None or matrix.active >= matrix.count:
        return 1.0
    return 1.0 - (1.0 - matrix.active / matrix.count) ** rows


def compute_bound_batch(model: ModelShape, bandwidth: float, flops: float, past: int = 0, recipe: str = "bf16",
                        kv_format: str = "bf16") -> int | None:
    """The smallest batch at which a decode step takes longer for its arithmetic than for its bytes; None: never.

    B * a / F >= (W + B * k) / bandwidth, with a operations and k cache bytes a row, W weight bytes. With a long
    past the cache bytes of a row take longer than its operations, and no batch helps.
    """
    one = step_cost(model, 1, 1, past, recipe, kv_format)
    gain = one.operations / flops - one.kv_bytes / bandwidth
    if gain <= 0:
        return None
    weights = weight_bytes_read(model, model.vocab_size, 1, recipe) if model.num_experts else one.weight_bytes
    return max(1, ceil(weights / bandwidth / gain))


def tokens_until_cache_equals_weights(model: ModelShape, recipe: str = "bf16", kv_format: str = "bf16") -> int | None:
    """The number of cached tokens, over all rows, that a decode step reads as many bytes for as for the weights."""
    from labkit.plan.kv import kv_bytes_per_token
    per_token = kv_bytes_per_token(model.kv, kv_format)
    return None if per_token == 0 else ceil(step_cost(model, recipe=recipe).weight_bytes / per_token)


def money_per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """What a million tokens cost on a machine that is paid by the hour and always busy."""
    if tokens_per_s <= 0 or price_per_hour < 0:
        raise BadRequest(f"{tokens_per_s} tok/s at {price_per_hour} an hour has no price; give a rate above 0.")
    return price_per_hour / 3600 / tokens_per_s * 1e6


# ---- guess and verify (labkit.speculate) -------------------------------------------------------------------------


@dataclass(frozen=True)
class SpeculationCosts:
    """`draft`: c, seconds of one drafted token / seconds of a plain target step. `verify[i]`: a target pass over i + 1
    tokens / a plain step, so verify[0] is 1; beyond the last, on along the straight line from the first. `fixed`: anything
    else that a pass costs, in plain steps."""

    draft: float = 0.0
    verify: tuple[float, ...] = (1.0, 1.05)
    fixed: float = 0.0

    def __post_init__(self):
        if self.draft < 0 or self.fixed < 0 or not self.verify or min(self.verify) <= 0:
            raise BadRequest(f"costs of {self.draft}, {self.verify} and {self.fixed} are not all positive; give shares of a plain step.")

    def verify_ratio(self, tokens: int) -> float:
        """A target pass over `tokens` tokens, in plain steps."""
        if tokens <= len(self.verify):
            return self.verify[tokens - 1]
        last = len(self.verify)
        slope = (self.verify[-1] - self.verify[0]) / (last - 1) if last > 1 else 0.0
        return self.verify[-1] + slope * (tokens - last)

    def pass_cost(self, length: int) -> float:
        """Draft and verify of one pass that drafts `length` tokens, in plain steps."""
        return length * self.draft + self.verify_ratio(length + 1) + (self.fixed if length else 0.0)


def expected_accepted_length(alpha: float, length: int) -> float:
    """Tokens a target pass gives: 1 + alpha + ... + alpha^length = (1 - alpha^(length + 1)) / (1 - alpha)."""
    if not 0 <= alpha <= 1 or length < 0:
        raise BadRequest(f"alpha {alpha} and a draft length of {length} give no expectation; alpha is 0 to 1, the length 0 or more.")
    return length + 1.0 if alpha == 1 else (1 - alpha ** (length + 1)) / (1 - alpha)


def speculative_speedup(alpha: float, length: int, costs: SpeculationCosts) -> float:
    """Plain time / speculative time for the same tokens (Leviathan et al., 2211.17192, with a verify pass that costs what it
    costs). Below 1 is a slowdown."""
    return expected_accepted_length(alpha, length) / costs.pass_cost(length)


def best_draft_length(alpha: float, costs: SpeculationCosts, most: int = 16) -> int:
    """The length with the largest speed-up, the shortest among equals; 0 where drafting loses."""
    return max(range(most + 1), key=lambda length: (speculative_speedup(alpha, length, costs), -length))


def break_even_alpha(length: int, costs: SpeculationCosts) -> float | None:
    """The acceptance above which drafting `length` tokens pays; None where not even 1 does."""
    if speculative_speedup(1.0, length, costs) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if speculative_speedup(middle, length, costs) >= 1 else (middle, high)
    return high
