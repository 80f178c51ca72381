"""The configuration of a decoder: what it computes, and errors for what it does not.

A checkpoint states its shape in a `config.json` (the hub's format) or in GGUF metadata.
`labkit.plan.hub_config` reads the first; `labkit.model.files.gguf_config` turns the second
into the first. What the decoder cannot compute raises an error here, by name, before a
single weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.errors import BadRequest, Number, OrNone, Whole, check_fields
from labkit.model.rope import RopeConfig
from labkit.plan.hub_config import HubConfig
from labkit.plan.kv import KVShape, LayerKV

ARCHITECTURES = {  # model_type -> transformers' name of the model
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma3_text": "Gemma3",
}
_STATED_BIASES = ("llama", "qwen3", "gemma3_text")  # architectures that read `attention_bias`
_NOT_COMPUTED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
    "num_kv_shared_layers",
    "kv_lora_rank",
)
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder; `from_hf` reads them, `to_hf` writes them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_positions: int = 2048
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] | None = None  # per layer; None: no layer has one
    local_rope: RopeConfig | None = None  # of windowed layers, if it differs (Gemma)
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    # MLA: width of the stored vector (head_dim is then that of unrotated keys and values),
    # and of the one rotated key.
    latent_dim: int | None = None
    rope_dim: int = 0
    # Per layer: the earlier layer whose keys and values it reads.
    kv_shared: tuple[int | None, ...] | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def __post_init__(self):
        check_architecture(self.architecture)
        sizes = dict.fromkeys(_SIZES, Whole(1))
        check_fields(self, **sizes, max_positions=OrNone(Whole(1)), norm_eps=Number(0))
        shared = self.kv_shared or (None,) * self.num_layers
        earlier = all(
            source is None or (source < i and shared[source] is None)
            for i, source in enumerate(shared)
        )
        latent, rotated = self.latent_dim is not None, self.rope_dim > 0
        rules = (
            (
                self.num_heads % self.num_kv_heads == 0,
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads; "
                "give a multiple",
            ),
            (
                self.head_dim % 2 == self.rope_dim % 2 == 0,
                f"head_dim is {self.head_dim} and rope_dim {self.rope_dim}, and RoPE rotates pairs "
                "of channels; give even numbers",
            ),
            (
                self.windows is None or len(self.windows) == self.num_layers,
                f"windows is {self.windows}; give one entry per layer, or None",
            ),
            (
                earlier and len(shared) == self.num_layers and not (any(shared) and latent),
                f"kv_shared is {shared}; give one entry per layer: None, or an earlier layer with "
                "keys of its own (never with latent attention)",
            ),
            (latent == rotated, "latent_dim and rope_dim go together; give both or neither"),
        )
        for holds, sentence in rules:
            if not holds:
                raise BadRequest(f"{sentence}.")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def is_gemma(self) -> bool:
        return self.architecture == "gemma3_text"

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def shared_with(self, layer: int) -> int | None:
        return self.kv_shared[layer] if self.kv_shared else None

    @property
    def kv_shape(self) -> KVShape:
        """What each layer caches."""
        latent = self.latent_dim
        kv = (self.num_kv_heads, self.head_dim) if latent is None else (1, latent)
        return KVShape(
            tuple(
                LayerKV(*kv, self.window(i), 0, latent, self.rope_dim, self.shared_with(i))
                for i in range(self.num_layers)
            )
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Return the configuration in the dict of a config.json, of older or newer spelling.

        Raises BadRequest for what the decoder does not compute.
        """
        architecture = check_architecture(config.get("model_type"))
        hub = HubConfig(config)
        gemma = architecture == "gemma3_text"
        activation = hub.get("hidden_activation" if gemma else "hidden_act")
        computed = "gelu_pytorch_tanh" if gemma else "silu"
        unsupported = {name: hub.get(name) for name in _NOT_COMPUTED if hub.get(name)}
        if activation not in (None, computed):
            unsupported = {"the activation": activation}
        for name, value in unsupported.items():
            raise BadRequest(
                f"{name} is {value!r}, which labkit.model does not compute for {architecture}: "
                "labkit.lab.hf runs the model through transformers."
            )
        attention_bias = bool(hub.get("attention_bias")) and architecture in _STATED_BIASES
        local_theta, longest = hub.rope["local_theta"], hub.get("max_position_embeddings")
        eos = hub.get("eos_token_id", ())
        return cls(
            architecture=architecture,
            vocab_size=hub.number("vocab_size"),
            hidden_size=hub.number("hidden_size"),
            num_layers=hub.num_layers,
            num_heads=hub.number("num_attention_heads"),
            num_kv_heads=hub.num_kv_heads,
            head_dim=hub.head_dim,
            intermediate_size=hub.number("intermediate_size"),
            norm_eps=hub.get("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_settings(hub.rope, longest),
            max_positions=longest,
            tie_embeddings=bool(hub.get("tie_word_embeddings")),
            qkv_bias=attention_bias or "qkv" in hub.kind.biases,
            o_bias=attention_bias,
            mlp_bias=bool(hub.get("mlp_bias")) and architecture == "llama",
            qk_norm=hub.kind.qk_norm,
            windows=hub.windows if any(hub.windows) else None,
            local_rope=RopeConfig(theta=float(local_theta)) if gemma else None,
            attention_scale=hub.number("query_pre_attn_scalar") ** -0.5 if gemma else None,
            bos_id=hub.get("bos_token_id"),
            eos_ids=tuple(eos) if isinstance(eos, list | tuple) else (eos,),
            pad_id=hub.get("pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the `config.json` that transformers reads: the inverse of `from_hf`."""
        widths = [width for width in self.windows or () if width is not None]
        eos = list(self.eos_ids)
        config = {
            "architectures": [ARCHITECTURES[self.architecture] + "ForCausalLM"],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": self.bos_id,
            "eos_token_id": eos if len(eos) > 1 else eos[0] if eos else None,
            "pad_token_id": self.pad_id,
            **self.rope.to_hf(),
        }
        if self.architecture in _STATED_BIASES:
            config["attention_bias"] = self.qkv_bias
        if self.architecture == "llama":
            config["mlp_bias"] = self.mlp_bias
        if self.architecture in ("qwen2", "qwen3"):
            config["use_sliding_window"] = bool(widths)
        if self.architecture != "llama" or widths:
            config["sliding_window"] = min(widths, default=None)
        if self.architecture not in ("llama", "mistral") or (
            self.architecture == "llama" and widths
        ):
            config["layer_types"] = [
                "full_attention" if self.window(i) is None else "sliding_attention"
                for i in range(self.num_layers)
            ]
        if self.local_rope is not None and self.attention_scale is not None:
            config |= {
                "rope_parameters": {
                    "full_attention": config["rope_parameters"],
                    "sliding_attention": self.local_rope.to_hf()["rope_parameters"],
                },
                "rope_local_base_freq": self.local_rope.theta,
                "query_pre_attn_scalar": round(self.attention_scale**-2),
                "hidden_activation": "gelu_pytorch_tanh",
                "sliding_window": min(widths, default=4096),
            }
        return config


def check_architecture(name: str | None) -> str:
    """Return the name of an architecture that the decoder computes; raises BadRequest for others."""
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise BadRequest(
            f"the architecture {name!r} is not one that labkit.model computes "
            f"({', '.join(ARCHITECTURES)}): labkit.lab.hf runs most other models through "
            "transformers."
        )
    return name
