"""What each known architecture adds to a plain Llama, as data: biases, norms, experts, windows, defaults.

A new architecture is one line here, if its layers are made of the parts that `layers.py` knows.
Source: the modelling files of transformers; a test counts the weights of both for every line.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """What an architecture adds to a plain Llama."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms: int = 2                       # per layer, of hidden size
    norm_bias: bool = False
    gated: bool = True
    tied: bool = False                   # where the config does not say
    experts: bool = False
    expert_bias: bool = False
    sinks: bool = False                  # one learned logit a head
    alternating: int = 0                 # every n-th layer is full, the others windowed, where the config has no list
    positions: bool = False              # learned position embedding
    defaults: tuple[tuple[str, object], ...] = ()


_GEMMA3 = (("num_attention_heads", 8), ("num_key_value_heads", 4), ("head_dim", 256), ("vocab_size", 262208),
           ("sliding_window", 4096))
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "phi3": Architecture(),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qk_norm=True),
    "gemma": Architecture(tied=True, defaults=(("head_dim", 256),)),
    "gemma2": Architecture(tied=True, norms=4, alternating=2, defaults=(("head_dim", 256), ("sliding_window", 4096))),
    "gemma3_text": Architecture(tied=True, norms=4, qk_norm=True, alternating=6, defaults=_GEMMA3),
    "mixtral": Architecture(experts=True),
    "qwen2_moe": Architecture(qkv_bias=True, experts=True),
    "qwen3_moe": Architecture(qk_norm=True, experts=True),
    "deepseek_v2": Architecture(experts=True),
    "deepseek_v3": Architecture(experts=True),
    "gpt_oss": Architecture(qkv_bias=True, o_bias=True, experts=True, expert_bias=True, sinks=True, alternating=2),
    "gpt2": Architecture(qkv_bias=True, o_bias=True, mlp_bias=True, norm_bias=True, gated=False, tied=True,
                         positions=True),
}
