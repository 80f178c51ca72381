"""Predict the memory of a run in addition to weights and cache.

This memory consists of activations, logits and the workspace of products. The layers
run one after the other, so only the intermediate results of one layer exist at a time.
Two places need most memory. In numbers per token:

    attention      3 E + 4 (H + K) D   residual, norm, q|k|v, rotated q|k|v, output
    feed-forward   3 E + 4 I           gate|up, silu(gate), the product

Logits: one row of V numbers per sequence in the model's dtype, and a float32 copy for
sampling. Workspace: in 16-bit formats, CPU libraries keep a reordered copy of a
product's operands, and PyTorch's threads keep buffers. The prediction counts the
largest matrix of a block for both together, and nothing for float32. Limitation:
attention that stores all scores needs H * T * S numbers more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from labkit.plan.shapes import ModelShape

NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Runtime:
    """Bytes of activations, logits and workspace."""

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
    number, attention = NUMBER_BYTES.get(dtype, 2), 0
    for kv in model.kv.layers:
        width = kv.head_dim if kv.latent_dim is None else kv.latent_dim + kv.rope_dim
        attention = max(attention, model.num_heads * width + kv.num_kv_heads * kv.head_dim)
    inner: Counter[int | None] = Counter()  # layer -> width, summed over its active experts
    for matrix in model.part("blocks"):
        if matrix.name.rpartition(".")[2] == "up":
            inner[matrix.layer] += matrix.active_parameters // matrix.columns
    per_token = 3 * model.hidden_size + 4 * max(attention, *inner.values())
    largest = max(matrix.rows * matrix.columns for matrix in model.part("blocks"))
    return Runtime(
        activations=tokens * sequences * per_token * number,
        logits=sequences * model.vocab_size * (number + 4),
        workspace=largest * number if number == 2 else 0,
    )
