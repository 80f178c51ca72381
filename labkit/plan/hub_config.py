"""Read a model's `config.json`: one reader for the plan, the decoder and transformers' models.

Two rules that widely copied formulas break. head_dim is what the config states; it is
hidden / heads only if the config is silent. The number of KV heads is
`num_key_value_heads`; without it (missing, or null) every query head has its own.
An architecture that is not in the table raises an error: a guess would look like a number.

A new architecture is one line in the table if its layers are made of the parts that
`labkit.plan.shapes` knows. Source: the configuration and modelling files of transformers;
a test counts the weights of both for every line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from labkit.errors import BadRequest
from labkit.files import read_json_object
from labkit.plan.kv import KVShape, LayerKV

ConfigSource = Mapping | str | Path


@dataclass(frozen=True)
class Architecture:
    """What an architecture adds to a plain Llama, and the defaults that its configs leave out."""

    biases: tuple[str, ...] = ()  # parts that always have one: qkv, o, mlp, norms, experts
    qk_norm: bool = False
    norms: int = 2  # per layer, of hidden size
    gated: bool = True
    experts: bool = False
    sinks: bool = False  # one learned logit per head
    full_every: int = 1  # every n-th layer has no window; 0: every layer has one if it is stated
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN = {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA3 = {
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(defaults={"max_position_embeddings": 2048}),
    "mistral": Architecture(
        full_every=0, defaults={"max_position_embeddings": 131072, "sliding_window": 4096}
    ),
    "phi3": Architecture(full_every=0),
    "qwen2": Architecture(("qkv",), full_every=0, defaults=_QWEN),
    "qwen3": Architecture(qk_norm=True, full_every=0, defaults=_QWEN | {"head_dim": 128}),
    "gemma": Architecture(defaults=_GEMMA),
    "gemma2": Architecture(norms=4, full_every=2, defaults=_GEMMA),
    "gemma3_text": Architecture(norms=4, qk_norm=True, full_every=6, defaults=_GEMMA3),
    "mixtral": Architecture(experts=True, full_every=0),
    "qwen2_moe": Architecture(("qkv",), experts=True, full_every=0, defaults=_QWEN),
    "qwen3_moe": Architecture(qk_norm=True, experts=True, full_every=0, defaults=_QWEN),
    "deepseek_v2": Architecture(experts=True),
    "deepseek_v3": Architecture(experts=True),
    "gpt_oss": Architecture(
        ("qkv", "o", "experts"),
        experts=True,
        sinks=True,
        full_every=2,
        defaults={"sliding_window": 128},
    ),
    "gpt2": Architecture(
        ("qkv", "o", "mlp", "norms"), gated=False, defaults={"tie_word_embeddings": True}
    ),
}
_SAME_AS = {"gemma3": "gemma3_text", "mistral3": "mistral", "ministral": "mistral"}
_OTHER_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "_sliding_window_pattern": "sliding_window_pattern",
}
_OPTIONAL = {  # smallest value -> whole numbers that may be missing or null
    1: "sliding_window sliding_window_pattern decoder_sparse_step intermediate_size v_head_dim "
    "max_position_embeddings q_lora_rank num_experts_per_tok experts_per_token",
    0: "moe_intermediate_size shared_expert_intermediate_size n_shared_experts num_experts "
    "num_local_experts n_routed_experts first_k_dense_replace max_window_layers "
    "num_kv_shared_layers",
}
_MOST_LAYERS = 10_000  # a typing error in a config must not run for hours


def read_config(source: ConfigSource) -> dict[str, Any]:
    """Return a config as a dict, from a dict, a config.json or its folder.

    Of a multimodal config the text part is returned. Raises BadRequest.
    """
    if not isinstance(source, Mapping):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            source = read_json_object(path)
        except OSError:
            raise BadRequest(
                f"{path} cannot be read; give a model's config.json or its folder."
            ) from None
    config: dict = dict(source)
    if isinstance(text := config.get("text_config"), Mapping):
        shared = ("model_type", "tie_word_embeddings", "torch_dtype", "dtype")
        config = {key: config[key] for key in shared if config.get(key) is not None} | dict(text)
    return {_OTHER_KEYS.get(key, key): value for key, value in config.items()}


class HubConfig:
    """The fields of a config, with the defaults of its architecture filled in and checked.

    `known`: raise BadRequest if the architecture is not in the table; otherwise read it as
    a plain one, which is enough for `kv_shape`.
    """

    def __init__(self, source: ConfigSource, known: bool = True):
        config = read_config(source)
        name = config.get("model_type")
        name = _SAME_AS.get(name, name) if isinstance(name, str) else repr(name)
        if known and name not in ARCHITECTURES:
            raise BadRequest(
                f"model_type {config.get('model_type')!r} is not an architecture that can be "
                f"planned; known are {', '.join(ARCHITECTURES)}."
            )
        self.architecture = name
        self.kind = ARCHITECTURES.get(name, Architecture(full_every=0))
        self.fields = {**self.kind.defaults, **config}
        for least, keys in _OPTIONAL.items():
            for key in keys.split():
                if self.get(key) is not None:
                    self.number(key, least)
        for key in ("layer_types", "mlp_only_layers"):
            if not isinstance(self.get(key, []), list):
                raise BadRequest(f"the config says {key} = {self.get(key)!r}; give a list.")
        self.num_layers = self.number("num_hidden_layers")
        if self.num_layers > _MOST_LAYERS:
            raise BadRequest(
                f"the config says num_hidden_layers = {self.num_layers}; "
                f"give {_MOST_LAYERS} or fewer."
            )

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field; null counts as absent."""
        value = self.fields.get(key)
        return default if value is None else value

    def number(self, key: str, least: int = 1) -> int:
        """Return a whole number of at least `least`; raises BadRequest if the field is not one."""
        value = self.fields.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadRequest(
                f"the config says {key} = {value!r}; give a whole number of at least {least}."
            )
        return value

    def table(self, key: str) -> dict[str, Any]:
        """Return a field that is an object; a missing one is empty."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise BadRequest(f"the config says {key} = {value!r}; give an object or null.")
        return dict(value)

    @cached_property
    def head_dim(self) -> int:
        if self.get("head_dim") is not None:
            return self.number("head_dim")
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        if hidden % heads:
            raise BadRequest(
                f"hidden_size {hidden} does not divide by {heads} heads and head_dim is not "
                "stated; add head_dim to the config."
            )
        return hidden // heads

    @cached_property
    def num_kv_heads(self) -> int:
        heads = self.number("num_attention_heads")
        if self.get("num_key_value_heads") is None:
            return heads
        kv_heads = self.number("num_key_value_heads")
        if heads % kv_heads:
            raise BadRequest(
                f"{heads} query heads cannot share {kv_heads} KV heads evenly; "
                "num_key_value_heads must divide num_attention_heads."
            )
        return kv_heads

    @cached_property
    def num_experts(self) -> int:
        keys = ("num_local_experts", "num_experts", "n_routed_experts")
        return next((self.number(key) for key in keys if self.get(key)), 0)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer (None: full attention)."""
        layers, kinds = self.num_layers, self.get("layer_types")
        if not self.get("use_sliding_window", True):
            return (None,) * layers
        if kinds is None:
            if self.get("sliding_window") is None:
                return (None,) * layers
            period = self.get("sliding_window_pattern", self.kind.full_every)
            first = self.get("max_window_layers", 0)
            full = [i < first or (period > 0 and (i + 1) % period == 0) for i in range(layers)]
            kinds = ["full_attention" if one else "sliding_attention" for one in full]
        if len(kinds) != layers:
            raise BadRequest(
                f"layer_types names {len(kinds)} layers and num_hidden_layers is {layers}; "
                "they must agree."
            )
        return tuple(
            self.number("sliding_window") if kind == "sliding_attention" else None for kind in kinds
        )

    @cached_property
    def rope(self) -> dict[str, Any]:
        """The rotary settings in the words of transformers 5, whichever way the config spells them.

        `local_theta` is the base of windowed layers if it differs (Gemma 3), else None.
        """
        newer = self.table("rope_parameters")
        settings = self.table("rope_scaling") | newer.get("full_attention", newer)
        local = newer.get("sliding_attention", {}).get("rope_theta")
        theta = settings.get("rope_theta") or self.get("rope_theta", 10000.0)
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
            raise BadRequest(f"the config says rope_theta = {theta!r}; give a number above 0.")
        partial = settings.get("partial_rotary_factor", self.get("partial_rotary_factor"))
        return settings | {
            "partial_rotary_factor": partial,
            "rope_type": settings.get("rope_type", settings.get("type", "default")),
            "rope_theta": float(theta),
            "local_theta": local or self.get("rope_local_base_freq"),
        }


def kv_shape(source: ConfigSource | HubConfig, known: bool = True) -> KVShape:
    """Return what each layer of the model caches; `known` as in `HubConfig`."""
    config = source if isinstance(source, HubConfig) else HubConfig(source, known)
    layers = config.num_layers
    if config.get("kv_lora_rank") is not None:
        latent = config.number("kv_lora_rank")
        rope_dim = config.number("qk_rope_head_dim")
        return KVShape((LayerKV(1, latent, latent_dim=latent, rope_dim=rope_dim),) * layers)
    windows, own = config.windows, layers - config.get("num_kv_shared_layers", 0)
    # A layer that shares reads the last layer of its kind (windowed or full) that caches.
    sources: list[int | None] = [None] * own
    for i in range(own, layers):
        same_kind = [j for j in range(own) if windows[j] == windows[i]]
        if not same_kind:
            raise BadRequest(
                f"num_kv_shared_layers = {layers - own} leaves layer {i} no earlier layer of its "
                "kind to read from; give fewer."
            )
        sources.append(same_kind[-1])
    heads, width = config.num_kv_heads, config.head_dim
    return KVShape(
        tuple(
            LayerKV(heads, width, window, shared_with=shared)
            for window, shared in zip(windows, sources, strict=True)
        )
    )
