"""What precedes what in the decoder: where AWQ may fold a scale without changing the model.

    attn_norm -> qkv        v rows of qkv -> o (a KV head serves H/K query heads)
    mlp_norm  -> gate_up    up rows of gate_up -> down: silu(gate) * up is linear in up

Norms after attention or MLP (Gemma) do not precede these linears; expert layers are left out.
"""

from __future__ import annotations

from torch import nn

from labkit.quant.awq import Fold


def fold_map(model) -> list[Fold]:
    """Return the folds of a `Decoder`, from the first layer to the last."""
    config, folds = model.config, []
    for index, layer in enumerate(model.layers):
        prefix = f"layers.{index}"
        plus_one = not isinstance(layer.attn_norm, nn.RMSNorm | nn.LayerNorm) and getattr(
            layer.attn_norm, "plus_one", False
        )
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
        if not hasattr(layer.mlp, "gate_up") or not isinstance(layer.mlp.gate_up, nn.Module):
            continue
        folds.append(Fold(f"{prefix}.mlp_norm", (f"{prefix}.mlp.gate_up",), plus_one=plus_one))
        inner = config.intermediate_size
        folds.append(Fold(f"{prefix}.mlp.gate_up", (f"{prefix}.mlp.down",), (inner, 2 * inner)))
    return folds
