"""What Gemma 3 does otherwise than Llama: its configuration's words, and its layer.

    x += norm(attention(norm(x)));  x += norm(mlp(norm(x)))          norms before and after ("sandwich")
    embedding * sqrt(E);  gate through tanh-GELU;  queries scaled by 1/sqrt(query_pre_attn_scalar), not by 1/sqrt(D)
    five layers of six see a window and turn with a rotary base of their own (10,000); the sixth sees everything

Windows are why its cache is small: past the window only every sixth layer still grows (Gemma 3 report, 2025).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.model.rope import RopeConfig

DEFAULTS = {"max_position_embeddings": 131072, "sliding_window": 4096, "head_dim": 256, "tie_word_embeddings": True,
            "num_attention_heads": 8, "num_key_value_heads": 4, "query_pre_attn_scalar": 256}  # fmt: skip
PATTERN = 6  # every so-manieth layer sees everything, where the configuration does not list them
THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def fields_from_hf(given: dict[str, Any], layers: int) -> dict[str, Any]:
    """The fields of a ModelConfig that only Gemma has, from a config.json of older or newer spelling."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if given.get(name):
            raise BadRequest(f"{name} is {given[name]!r}, which labkit.model does not compute: labkit.hf runs this model.")
    turns = given.get("rope_parameters") or {}
    longest = given["max_position_embeddings"]
    if "full_attention" in turns:
        whole, local = turns["full_attention"], turns.get("sliding_attention") or {}
    else:
        whole = {**(given.get("rope_scaling") or {}), "rope_theta": given.get("rope_theta") or THETA, **turns}
        local = {"rope_theta": given.get("rope_local_base_freq")}
    whole, local = {"rope_theta": THETA} | whole, {"rope_theta": local.get("rope_theta") or LOCAL_THETA}
    every = given.get("sliding_window_pattern") or given.get("_sliding_window_pattern") or PATTERN
    kinds = given.get("layer_types") or ["full" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
    return {
        "rope": RopeConfig.from_hf({"rope_parameters": whole, "max_position_embeddings": longest}),
        "local_rope": RopeConfig(theta=float(local["rope_theta"])),
        "windows": tuple(given["sliding_window"] if kind == "sliding_attention" else None for kind in kinds),
        "attention_scale": given["query_pre_attn_scalar"] ** -0.5,
    }


def fields_to_hf(config) -> dict[str, Any]:
    """The same, as transformers reads them."""
    turns = {"full_attention": config.rope.to_hf()["rope_parameters"],
             "sliding_attention": config.local_rope.to_hf()["rope_parameters"]}  # fmt: skip
    scalar = config.attention_scale**-2
    return {
        "rope_parameters": turns, "rope_theta": config.rope.theta, "rope_local_base_freq": config.local_rope.theta,
        "rope_scaling": config.rope.to_hf()["rope_scaling"], "query_pre_attn_scalar": round(scalar),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": next((w for w in config.windows or () if w is not None), DEFAULTS["sliding_window"]),
        "layer_types": ["full_attention" if config.window(i) is None else "sliding_attention"
                        for i in range(config.num_layers)],
    }  # fmt: skip


class SandwichLayer(nn.Module):
    """A layer whose attention and MLP stand between two norms each."""

    def __init__(self, attn_norm, attention, attn_post_norm, mlp_norm, mlp, mlp_post_norm):
        super().__init__()
        self.attn_norm, self.attention, self.attn_post_norm = attn_norm, attention, attn_post_norm
        self.mlp_norm, self.mlp, self.mlp_post_norm = mlp_norm, mlp, mlp_post_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache=None) -> Tensor:
        x = x + self.attn_post_norm(self.attention(self.attn_norm(x), cos, sin, cache))
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))  # [B, T, E]
