"""Read a model's `config.json` for the plan, the decoder and transformers' models.

Two rules matter, and widely copied formulas break them. `head_dim` is the number in the
config; it is hidden size / heads only if the config has none. The number of KV heads is
`num_key_value_heads`; if it is missing or null, each query head has a KV head of its
own.

An architecture that is not in the table raises an error, because a guess would look
like a result. To add an architecture whose layers consist of the parts in
`labkit.plan.shapes`, add one line to the table. Source: the configuration and modelling
files of transformers. A test compares the number of weights for every line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from labkit.errors import BadRequest, Number, OneOf, OrNone, Rule, Whole
from labkit.files import read_json_object
from labkit.plan.kv import KVShape, LayerKV

ConfigSource = Mapping | str | Path


@dataclass(frozen=True)
class Architecture:
    """The differences of an architecture from Llama, and defaults for missing fields."""

    # Parts that always have a bias: qkv, o, mlp, norms, experts. sinks: one logit per head.
    biases: tuple[str, ...] = ()
    qk_norm: bool = False
    norms: int = 2  # per layer, of hidden size
    gated: bool = True
    experts: bool = False
    full_every: int = 1  # every n-th layer has no window; 0: all layers have the config's window
    windows_first: bool = False  # windows before layer `max_window_layers`, not from it on
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN: dict[str, Any] = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
_QWEN |= {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_QWEN2_MOE = _QWEN | {"num_key_value_heads": 16, "moe_intermediate_size": 1408}
_QWEN2_MOE |= {"shared_expert_intermediate_size": 5632}
_QWEN3_MOE: dict[str, Any] = {"max_position_embeddings": 32768, "num_key_value_heads": 4}
_QWEN3_MOE |= {"use_sliding_window": False, "sliding_window": 4096, "moe_intermediate_size": 768}
_GEMMA: dict[str, Any] = {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096}
_GEMMA |= {"max_position_embeddings": 8192, "num_key_value_heads": 4}
_GEMMA3 = _GEMMA | {"max_position_embeddings": 131072, "vocab_size": 262208}
_GEMMA3 |= {"num_attention_heads": 8, "query_pre_attn_scalar": 256, "sliding_window_pattern": 6}
_GEMMA3 |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
_MIXTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
_MISTRAL = _MIXTRAL | {"sliding_window": 4096}
_DEEPSEEK2: dict[str, Any] = {"max_position_embeddings": 2048, "q_lora_rank": 1536}
_DEEPSEEK2 |= {"moe_intermediate_size": 1407, "n_shared_experts": 2, "kv_lora_rank": 512}
_DEEPSEEK2 |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_DEEPSEEK3 = _DEEPSEEK2 | {"max_position_embeddings": 4096, "moe_intermediate_size": 2048}
_DEEPSEEK3 |= {"n_shared_experts": 1, "first_k_dense_replace": 3}
_GPT_OSS = {"sliding_window": 128, "head_dim": 64, "num_key_value_heads": 8}
_GPT_OSS |= {"max_position_embeddings": 131072}
_GPT2 = {"tie_word_embeddings": True, "max_position_embeddings": 1024}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(defaults={"max_position_embeddings": 2048}),
    "mistral": Architecture(full_every=0, defaults=_MISTRAL),
    "phi3": Architecture(full_every=0, defaults={"max_position_embeddings": 4096}),
    "qwen2": Architecture(("qkv",), full_every=0, defaults=_QWEN),
    "qwen3": Architecture(qk_norm=True, full_every=0, defaults=_QWEN | {"head_dim": 128}),
    "gemma": Architecture(defaults=_GEMMA | {"num_key_value_heads": 16}),
    "gemma2": Architecture(norms=4, full_every=2, defaults=_GEMMA),
    "gemma3_text": Architecture(norms=4, qk_norm=True, full_every=6, defaults=_GEMMA3),
    "mixtral": Architecture(experts=True, full_every=0, defaults=_MIXTRAL),
    "qwen2_moe": Architecture(
        ("qkv",), experts=True, full_every=2, windows_first=True, defaults=_QWEN2_MOE
    ),
    "qwen3_moe": Architecture(qk_norm=True, experts=True, full_every=0, defaults=_QWEN3_MOE),
    "deepseek_v2": Architecture(experts=True, defaults=_DEEPSEEK2),
    "deepseek_v3": Architecture(experts=True, defaults=_DEEPSEEK3),
    "gpt_oss": Architecture(
        ("qkv", "o", "experts", "sinks"), experts=True, full_every=2, defaults=_GPT_OSS
    ),
    "gpt2": Architecture(("qkv", "o", "mlp", "norms"), gated=False, defaults=_GPT2),
}
_SAME_AS = {"gemma3": "gemma3_text", "mistral3": "mistral", "ministral": "mistral"}
_OTHER_KEYS = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers"}  # of GPT-2, of Gemma 3
_OTHER_KEYS |= {"n_head": "num_attention_heads", "n_positions": "max_position_embeddings"}
_OTHER_KEYS |= {"n_inner": "intermediate_size", "_sliding_window_pattern": "sliding_window_pattern"}
_OPTIONAL = {  # smallest value -> whole numbers that may be missing or null
    1: "sliding_window sliding_window_pattern decoder_sparse_step intermediate_size v_head_dim "
    "max_position_embeddings q_lora_rank num_experts_per_tok experts_per_token",
    0: "moe_intermediate_size shared_expert_intermediate_size n_shared_experts num_experts "
    "num_local_experts n_routed_experts first_k_dense_replace max_window_layers "
    "num_kv_shared_layers",
}
_MOST_LAYERS = 10_000  # a typing error in a config must not cost hours
_LIST = Rule("a list or null", lambda value: value is None or isinstance(value, list))
_OBJECT = Rule("an object or null", lambda value: value is None or isinstance(value, Mapping))


def read_config(source: ConfigSource) -> dict[str, Any]:
    """Return a config as a dict, from a dict, a config.json, or the folder of one.

    For a multimodal model, return the config of the text part. Raises BadRequest for a
    file that is not a JSON object.
    """
    if not isinstance(source, Mapping):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            source = read_json_object(path)
        except (OSError, BadRequest):
            raise BadRequest(
                f"{path} is not a JSON model configuration; give a config.json or its folder."
            ) from None
    config: dict = dict(source)
    if isinstance(text := config.get("text_config"), Mapping):
        shared = "model_type tie_word_embeddings torch_dtype dtype quantization_config".split()
        config = {key: config[key] for key in shared if config.get(key) is not None} | dict(text)
    return {_OTHER_KEYS.get(key, key): value for key, value in config.items()}


def _checked(key: str, value: Any, rule: Rule) -> Any:
    if not rule.accepts(value):
        raise BadRequest(f"The config has {key} = {value!r}; give {rule.allowed}.")
    return value


class HubConfig:
    """The fields of a config, checked, with the defaults of its architecture.

    Raises BadRequest for an architecture that is not in the table. With `known=False`
    it reads such a config like Llama's; `kv_shape` needs no more.
    """

    def __init__(self, source: ConfigSource, known: bool = True):
        config = read_config(source)
        name = config.get("model_type")
        name = _SAME_AS.get(name, name) if isinstance(name, str) else repr(name)
        if known and name not in ARCHITECTURES:
            raise BadRequest(f"model_type is {name}; choose one of {', '.join(ARCHITECTURES)}.")
        self.architecture = name
        self.kind = ARCHITECTURES.get(name, Architecture(full_every=0))
        self.fields = {**self.kind.defaults, **config}
        for least, keys in _OPTIONAL.items():
            for key in keys.split():
                _checked(key, self.get(key), OrNone(Whole(least)))
        for key in ("layer_types", "mlp_only_layers"):
            _checked(key, self.get(key), _LIST)
        self.num_layers = self.number("num_hidden_layers", _MOST_LAYERS)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field, or the default if it is missing or null."""
        value = self.fields.get(key)
        return default if value is None else value

    def number(self, key: str, most: int | None = None) -> int:
        """Return a whole number from 1 to `most`; raises BadRequest for another value."""
        return _checked(key, self.get(key), Whole(1, most))

    @cached_property
    def head_dim(self) -> int:
        """The numbers per head."""
        if self.get("head_dim") is not None:
            return self.number("head_dim")
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        if hidden % heads:
            raise BadRequest(f"{heads} heads do not divide hidden_size {hidden}; give head_dim.")
        return hidden // heads

    @cached_property
    def num_kv_heads(self) -> int:
        """The number of KV heads, which divides the number of query heads."""
        heads = self.number("num_attention_heads")
        stated = self.get("num_key_value_heads") is not None
        kv_heads = self.number("num_key_value_heads") if stated else heads
        if heads % kv_heads:
            raise BadRequest(
                f"{heads} query heads cannot share {kv_heads} KV heads; give a divisor."
            )
        return kv_heads

    @cached_property
    def num_experts(self) -> int:
        """The number of experts per layer; 0 for a model without experts."""
        keys = ("num_local_experts", "num_experts", "n_routed_experts")
        return next((self.number(key) for key in keys if self.get(key)), 0)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer (None: full attention)."""
        layers, kinds = self.num_layers, self.get("layer_types")
        if kinds is None:
            period = self._read("sliding_window_pattern", self.kind.full_every)
            first, early = self._read("max_window_layers", 0), self.kind.windows_first
            full = [
                (i < first) != early or (period and not (i + 1) % period) for i in range(layers)
            ]
            kinds = ["full_attention" if one else "sliding_attention" for one in full]
        if len(kinds) != layers:
            raise BadRequest(f"layer_types has {len(kinds)} entries; give one per layer, {layers}.")
        for kind in kinds:
            _checked("layer_types", kind, OneOf("full_attention", "sliding_attention"))
        windowed = self.get("sliding_window") and self._read("use_sliding_window", True)
        window = self.number("sliding_window") if windowed else None
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def _read(self, key: str, default: Any) -> Any:
        """Return a field that this architecture reads; others keep the default."""
        return self.get(key, default) if key in self.kind.defaults else default

    @property
    def quantization(self) -> str | None:
        """The method of a quantized checkpoint; None if its weights are not quantized."""
        settings = _checked("quantization_config", self.get("quantization_config"), _OBJECT)
        return None if settings is None else str(settings.get("quant_method", "unknown"))

    @property
    def max_positions(self) -> int | None:
        """The longest context, which YaRN and linear scaling stretch by their factor."""
        stated, factor = self.get("max_position_embeddings"), self.rope.get("factor") or 1
        if stated is None or self.rope["rope_type"] not in ("yarn", "linear"):
            return stated
        if self.architecture == "gemma3_text":  # states the stretched context
            return stated
        original = self.rope.get("original_max_position_embeddings") or stated
        return max(stated, int(original * _checked("factor", factor, Number(1))))

    @cached_property
    def rope(self) -> dict[str, Any]:
        """The rotary settings under their names in transformers 5, from older names too.

        `local_theta` is the base of windowed layers if it differs (Gemma 3), else None.
        """
        newer, older = (
            _checked(key, self.get(key, {}), _OBJECT) for key in ("rope_parameters", "rope_scaling")
        )
        settings = {**older, **newer.get("full_attention", newer)}
        local = newer.get("sliding_attention", {}).get("rope_theta")
        theta = settings.get("rope_theta") or self.get("rope_theta", 10000.0)
        partial = settings.get("partial_rotary_factor", self.get("partial_rotary_factor"))
        return settings | {
            "partial_rotary_factor": partial,
            "rope_type": settings.get("rope_type", settings.get("type", "default")),
            "rope_theta": float(_checked("rope_theta", theta, Number(above=0))),
            "local_theta": local or self.get("rope_local_base_freq"),
        }


def kv_shape(source: ConfigSource | HubConfig, known: bool = True) -> KVShape:
    """Return what each layer of the model caches; `known` as for `HubConfig`."""
    config = source if isinstance(source, HubConfig) else HubConfig(source, known)
    layers = config.num_layers
    if config.get("kv_lora_rank") is not None:
        latent = config.number("kv_lora_rank")
        rope_dim = config.number("qk_rope_head_dim")
        return KVShape((LayerKV(1, latent, latent_dim=latent, rope_dim=rope_dim),) * layers)
    windows, heads, head_dim = config.windows, config.num_kv_heads, config.head_dim
    own = max(layers - config.get("num_kv_shared_layers", 0), 0)
    own_layers = [LayerKV(heads, head_dim, window) for window in windows[:own]]
    # A layer without a cache reads the last one of its kind (same window).
    last = {window: i for i, window in enumerate(windows[:own])}
    if not set(windows[own:]) <= set(last):
        raise BadRequest(
            f"num_kv_shared_layers is {layers - own}; give fewer, so that each of these layers "
            "has an earlier layer of its kind."
        )
    shared = [
        LayerKV(heads, head_dim, window, shared_with=last[window]) for window in windows[own:]
    ]
    return KVShape((*own_layers, *shared))
