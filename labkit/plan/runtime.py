"""What a run needs besides weights and cache: activations, logits, and the products' workspace.

While a step runs, N = sequences * tokens vectors pass through one layer at a time; only one layer's
intermediates live at once. The two places where most is alive, in numbers per token:
    attention   3 E + 2 (H + 2K) D + 2 H D                 residual, normed copy, q|k|v, its rotated copy, output
    feed-forward   3 E + 4 I                               gate|up, silu(gate), the product
Logits: one row of V a sequence in the model's dtype, and a float32 copy that sampling works on.
Workspace: CPU libraries keep a reordered copy of the product's operands in 16-bit formats, and PyTorch threads
keep buffers; counted as the largest matrix of a block for bf16/fp16, and nothing for float32.
When it loses: attention written with a full score matrix adds H * T * S numbers (`scores=True`).
"""

from __future__ import annotations

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


def runtime_bytes(model: ModelShape, tokens: int, sequences: int = 1, dtype: str = "bf16", *, past: int = 0,
                  all_logits: bool = False, scores: bool = False) -> Runtime:
    """Bytes alive at the peak of one forward pass: `tokens` tokens in each of `sequences` rows after `past` others."""
    number = NUMBER_BYTES.get(dtype, 2)
    rows = tokens * sequences
    attention = max(_attention_width(model, i) for i in range(model.num_layers))
    per_token = 3 * model.hidden_size + max(attention, 4 * widest_mlp(model))
    activations = rows * per_token * number
    if scores:
        activations += sequences * model.num_heads * tokens * (tokens + past) * 4
    logits = (rows if all_logits else sequences) * model.vocab_size * (number + 4)
    largest = max(matrix.rows * matrix.columns for matrix in model.part("blocks"))
    return Runtime(activations, logits, largest * number if number == 2 else 0)


def _attention_width(model: ModelShape, layer: int) -> int:
    queries = model.query_width(layer)
    kv = model.kv.layers[layer]
    return 2 * (queries + 2 * kv.num_kv_heads * kv.head_dim) + 2 * queries


def widest_mlp(model: ModelShape) -> int:
    """Inner width that one token passes through: of a mixture, all its active experts together."""
    per_layer: dict[int, int] = {}
    for matrix in model.part("blocks"):
        if matrix.name.rpartition(".")[2] == "up":
            active = matrix.count if matrix.active is None else matrix.active
            per_layer[matrix.layer] = per_layer.get(matrix.layer, 0) + matrix.rows * active
    return max(per_layer.values())
