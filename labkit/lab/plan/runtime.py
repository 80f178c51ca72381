"""Predict the memory of a run besides weights and cache.

It consists of activations, logits and the workspace of products. While a step runs,
sequences * tokens vectors pass through one layer at a time, so only one layer's
intermediates exist at once. The two places that use most memory, in numbers per token:

    attention      3 E + 2 (H + 2K) D + 2 H D   residual, norm, q|k|v, rotated, output
    feed-forward   3 E + 4 I                    gate|up, silu(gate), the product

Logits: one row of V per sequence in the model's dtype, and a float32 copy for sampling.
Workspace: CPU libraries keep a reordered copy of the product's operands in 16-bit
formats, and PyTorch threads keep buffers. Both together count as the largest matrix of
a block for bf16 and fp16, and as nothing for float32. Limitation: attention computed
with a full score matrix adds H * T * S numbers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from labkit.plan.shapes import ModelShape

NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Runtime:
    activations: int
    logits: int
    workspace: int

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.workspace


def runtime_bytes(
    model: ModelShape, tokens: int, sequences: int = 1, dtype: str = "bf16"
) -> Runtime:
    """Return the peak bytes of a pass of `sequences` rows of `tokens` tokens."""
    number = NUMBER_BYTES.get(dtype, 2)
    attention = max(_attention_width(model, i) for i in range(model.num_layers))
    per_token = 3 * model.hidden_size + max(attention, 4 * widest_mlp(model))
    largest = max(matrix.rows * matrix.columns for matrix in model.part("blocks"))
    return Runtime(
        activations=tokens * sequences * per_token * number,
        logits=sequences * model.vocab_size * (number + 4),
        workspace=largest * number if number == 2 else 0,
    )


def _attention_width(model: ModelShape, layer: int) -> int:
    queries, kv = model.query_width(layer), model.kv.layers[layer]
    return 2 * (queries + 2 * kv.num_kv_heads * kv.head_dim) + 2 * queries


def widest_mlp(model: ModelShape) -> int:
    """Return the inner width that one token uses, summed over its active experts."""
    widths: Counter[int | None] = Counter()
    for matrix in model.part("blocks"):
        if matrix.name.rpartition(".")[2] == "up":
            active = matrix.count if matrix.active is None else matrix.active
            widths[matrix.layer] += matrix.rows * active
    return max(widths.values())
