"""The configuration of a decoder.

`labkit.plan.hub_config` reads a `config.json` in the hub's format, and this module turns it
into a `ModelConfig`. `labkit.model.files.gguf_config` does the same for GGUF metadata. A
setting that the decoder does not support raises an error before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.errors import BadRequest, Number, OneOf, OrNone, Whole, check_fields
from labkit.model.rope import RopeConfig, check_supported
from labkit.plan.hub_config import HubConfig
from labkit.plan.kv import KVShape, LayerKV

ARCHITECTURES = {  # model_type -> the model's name in transformers
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma3_text": "Gemma3",
}
_STATED_BIASES = ("llama", "qwen3", "gemma3_text")  # architectures that read `attention_bias`
_NOT_SUPPORTED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
    "num_kv_shared_layers",
    "kv_lora_rank",
)
_SIZES = {  # field -> its key in a config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder.

    `from_hf` reads them from the contents of a config.json and `to_hf` writes them. Raises
    BadRequest if two fields do not fit together.
    """

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
    windows: tuple[int | None, ...] | None = None  # one per layer; None: no layer has one
    local_rope: RopeConfig | None = None  # RoPE of windowed layers, if it differs (Gemma)
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    # Latent attention: numbers per cached latent vector and per rotated key. `head_dim` then
    # counts the numbers per head that are not rotated.
    latent_dim: int | None = None
    rope_dim: int = 0
    # One per layer: the earlier layer whose keys and values it reads, or None.
    kv_shared: tuple[int | None, ...] | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def __post_init__(self):
        check_fields(self, architecture=OneOf(*ARCHITECTURES), norm_eps=Number(0))
        check_fields(self, **dict.fromkeys(_SIZES, Whole(1)), max_positions=OrNone(Whole(1)))
        layers, heads, kv_heads = self.num_layers, self.num_heads, self.num_kv_heads
        latent, rope_dim = self.latent_dim is not None, self.rope_dim
        shared = self.kv_shared or (None,) * layers
        earlier = len(shared) == layers and all(
            source is None or (source < i and shared[source] is None)
            for i, source in enumerate(shared)
        )
        divides = heads % kv_heads == 0
        even = self.head_dim % 2 == rope_dim % 2 == 0
        one_kind = not (latent and self.kv_shared)
        windows_fit = self.windows is None or len(self.windows) == layers
        rules = {
            f"{heads} query heads cannot share {kv_heads} KV heads; give a multiple.": divides,
            f"head_dim is {self.head_dim} and rope_dim {rope_dim}; give even numbers.": even,
            f"windows is {self.windows}; give one entry per layer, or None.": windows_fit,
            f"kv_shared is {shared}; per layer, give an earlier layer that has None.": earlier,
            "latent_dim and kv_shared exclude each other; give one.": one_kind,
            "latent_dim and rope_dim belong together; give both.": latent == (rope_dim > 0),
        }
        for error, holds in rules.items():
            if not holds:
                raise BadRequest(error)

    @property
    def q_size(self) -> int:
        """The total size of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """The total size of the keys (or of the values) of all heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def is_gemma(self) -> bool:
        return self.architecture == "gemma3_text"

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that a layer attends to (None: all)."""
        return self.windows[layer] if self.windows else None

    def shared_with(self, layer: int) -> int | None:
        """Return the layer whose keys and values this layer reads (None: its own)."""
        return self.kv_shared[layer] if self.kv_shared else None

    @property
    def kv_shape(self) -> KVShape:
        """The shape of the keys and values that each layer caches."""
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
        """Return the configuration in the contents of a config.json, with old or new keys.

        Raises BadRequest for a setting that the decoder does not support.
        """
        architecture = config.get("model_type")
        check_supported("model_type", architecture, *ARCHITECTURES)
        hub, gemma = HubConfig(config), architecture == "gemma3_text"
        key = "hidden_activation" if gemma else "hidden_act"
        activation = "gelu_pytorch_tanh" if gemma else "silu"
        check_supported(key, hub.get(key, activation), activation)
        for name in _NOT_SUPPORTED:
            check_supported(name, hub.get(name) or None, None)
        attention_bias = bool(hub.get("attention_bias")) and architecture in _STATED_BIASES
        eos, longest = hub.get("eos_token_id", ()), hub.get("max_position_embeddings")
        # HubConfig has attributes for the sizes that a config may leave out.
        sizes: dict[str, Any] = {
            name: getattr(hub, name, None) or hub.number(key) for name, key in _SIZES.items()
        }
        return cls(
            architecture=hub.architecture,
            **sizes,
            norm_eps=hub.get("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_settings(hub.rope, longest),
            max_positions=longest,
            tie_embeddings=bool(hub.get("tie_word_embeddings")),
            qkv_bias=attention_bias or "qkv" in hub.kind.biases,
            o_bias=attention_bias,
            mlp_bias=bool(hub.get("mlp_bias")) and architecture == "llama",
            qk_norm=hub.kind.qk_norm,
            windows=hub.windows if any(hub.windows) else None,
            local_rope=RopeConfig(theta=float(hub.rope["local_theta"])) if gemma else None,
            attention_scale=hub.number("query_pre_attn_scalar") ** -0.5 if gemma else None,
            bos_id=hub.get("bos_token_id"),
            eos_ids=tuple(eos) if isinstance(eos, list | tuple) else (eos,),
            pad_id=hub.get("pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of a config.json for transformers: the inverse of `from_hf`."""
        widths = [width for width in self.windows or () if width is not None]
        eos = list(self.eos_ids)
        config = {
            "architectures": [ARCHITECTURES[self.architecture] + "ForCausalLM"],
            "model_type": self.architecture,
            **{key: getattr(self, field) for field, key in _SIZES.items()},
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
            if self.architecture != "mistral":
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
