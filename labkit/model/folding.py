"""List the places where AWQ can fold a scale without changing the model.

    attn_norm -> qkv
    v rows of qkv -> o             each KV head serves H/K query heads
    mlp_norm -> gate_up
    up rows of gate_up -> down     silu(gate) * up is linear in up

A scale is divided out of the first part and multiplied into the second. Gemma's norms after
attention and MLP precede no linear.
"""

from __future__ import annotations

from labkit.model.norm_mlp import PlusOneNorm
from labkit.quant.awq import Fold


def fold_map(model) -> list[Fold]:
    """Return the folds of a `Decoder`, from the first layer to the last."""
    config, folds = model.config, []
    for index, layer in enumerate(model.layers):
        prefix = f"layers.{index}"
        plus_one = isinstance(layer.attn_norm, PlusOneNorm)
        folds.append(Fold(f"{prefix}.attn_norm", (f"{prefix}.attention.qkv",), plus_one=plus_one))
        first_v = config.q_size + config.kv_size
        folds.append(
            Fold(
                f"{prefix}.attention.qkv",
                (f"{prefix}.attention.o",),
                (first_v, first_v + config.kv_size),
                repeat=config.num_heads // config.num_kv_heads,
                head_dim=config.head_dim,
            )
        )
        folds.append(Fold(f"{prefix}.mlp_norm", (f"{prefix}.mlp.gate_up",), plus_one=plus_one))
        inner = config.intermediate_size
        folds.append(Fold(f"{prefix}.mlp.gate_up", (f"{prefix}.mlp.down",), (inner, 2 * inner)))
    return folds
