"""From a hub `config.json` to the shapes of the model: which matrices there are, and what is cached.

Two rules that widely copied formulas break: head_dim is what the config *states*, and hidden/heads only where it
is silent; the number of KV heads is `num_key_value_heads`, and without it (missing, or null) every query head has
its own. An architecture that is not in the table is refused by name: a guess would look like a number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from labkit.errors import BadRequest
from labkit.plan.architectures import ARCHITECTURES, Architecture
from labkit.plan.kv import KVShape, LayerKV
from labkit.plan.shapes import Matrix, ModelShape

_OTHER_NAMES = {"gemma3": "gemma3_text", "mistral3": "mistral", "ministral": "mistral"}
_GPT2_KEYS = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
              "n_positions": "max_position_embeddings", "n_inner": "intermediate_size"}
_LEAST = {  # optional whole numbers and the least that each can be; null is as good as absent
    "sliding_window": 1, "sliding_window_pattern": 1, "decoder_sparse_step": 1, "intermediate_size": 1,
    "max_position_embeddings": 1, "v_head_dim": 1, "q_lora_rank": 1, "num_experts_per_tok": 1, "experts_per_token": 1,
    "moe_intermediate_size": 0, "shared_expert_intermediate_size": 0, "n_shared_experts": 0, "num_local_experts": 0,
    "num_experts": 0, "n_routed_experts": 0, "first_k_dense_replace": 0, "max_window_layers": 0,
    "num_kv_shared_layers": 0,
}
_MOST_LAYERS = 10_000  # a typing error in a config must not run for hours
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def read_config(source: Mapping | str | Path) -> dict:
    """A config as a dict, from a dict, a config.json, or its folder; of a multimodal one the text part."""
    if not isinstance(source, Mapping):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            source = json.loads(path.read_text(encoding="utf-8"))
        except OSError:
            raise BadRequest(f"{path} cannot be read; give a model's config.json or its folder.") from None
        except ValueError:
            raise BadRequest(f"{path} is not JSON; give the config.json of a model.") from None
        if not isinstance(source, dict):
            raise BadRequest(f"{path} holds no JSON object; give the config.json of a model.")
    config = dict(source)
    if isinstance(config.get("text_config"), Mapping):
        inner = dict(config["text_config"])
        inner.setdefault("model_type", config.get("model_type"))
        for key in ("tie_word_embeddings", "torch_dtype", "dtype"):
            if config.get(key) is not None:
                inner.setdefault(key, config[key])
        config = inner
    return {_GPT2_KEYS.get(key, key): value for key, value in config.items()}


def architecture_of(config: Mapping) -> tuple[str, Architecture]:
    name = config.get("model_type")
    name = _OTHER_NAMES.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise BadRequest(f"model_type {name!r} is not an architecture that can be planned; "
                         f"known are {', '.join(ARCHITECTURES)}.")
    return name, ARCHITECTURES[name]


class Fields:
    """A config with its architecture's defaults; a needed field that is missing is refused by name."""

    def __init__(self, source: Mapping | str | Path):
        self.config = read_config(source)
        self.architecture, self.kind = architecture_of(self.config)
        for key, value in self.kind.defaults:
            self.config.setdefault(key, value)
        for key, least in _LEAST.items():
            if self.get(key) is not None:
                self.number(key, least)
        for key in ("layer_types", "mlp_only_layers"):
            if not isinstance(self.get(key, []), list):
                raise BadRequest(f"the config says {key} = {self.config[key]!r}; a list is needed there.")
        if self.number("num_hidden_layers") > _MOST_LAYERS:
            raise BadRequest(f"the config says num_hidden_layers = {self.config['num_hidden_layers']}; at most "
                             f"{_MOST_LAYERS} are planned.")

    def get(self, key: str, default=None):
        value = self.config.get(key)
        return default if value is None else value

    def number(self, key: str, least: int = 1) -> int:
        value = self.config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadRequest(f"the config says {key} = {value!r}; a whole number of at least {least} is needed there.")
        return value

    @property
    def head_dim(self) -> int:
        if self.get("head_dim") is not None:
            return self.number("head_dim")
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        if hidden % heads:
            raise BadRequest(f"hidden_size {hidden} does not divide by {heads} heads and head_dim is not stated; "
                             "add head_dim to the config.")
        return hidden // heads

    @property
    def num_kv_heads(self) -> int:
        heads = self.number("num_attention_heads")
        kv_heads = self.number("num_key_value_heads") if self.get("num_key_value_heads") is not None else heads
        if heads % kv_heads:
            raise BadRequest(f"{heads} query heads cannot share {kv_heads} KV heads evenly; num_key_value_heads must "
                             "divide num_attention_heads.")
        return kv_heads


def windows(fields: Fields) -> tuple[int | None, ...]:
    """The window of each layer (None: full attention), by the architecture's own rule where no list is given."""
    layers, window = fields.number("num_hidden_layers"), fields.get("sliding_window")
    kinds = fields.get("layer_types")
    if kinds is not None:
        if len(kinds) != layers:
            raise BadRequest(f"layer_types names {len(kinds)} layers and num_hidden_layers is {layers}; "
                             "they must agree.")
        return tuple(fields.number("sliding_window") if kind == "sliding_attention" else None for kind in kinds)
    if fields.kind.alternating:
        period = fields.get("sliding_window_pattern", fields.kind.alternating)
        return tuple(None if (i + 1) % period == 0 else fields.number("sliding_window") for i in range(layers))
    if fields.architecture.startswith("qwen"):
        if not fields.get("use_sliding_window", False):
            return (None,) * layers
        return tuple(window if i >= fields.get("max_window_layers", 0) else None for i in range(layers))
    return (window,) * layers


def kv_shape(source: Mapping | str | Path | Fields) -> KVShape:
    """What each layer of the model caches."""
    fields = source if isinstance(source, Fields) else Fields(source)
    layers = fields.number("num_hidden_layers")
    if fields.get("kv_lora_rank") is not None:
        layer = LayerKV(1, fields.number("kv_lora_rank"), latent_dim=fields.number("kv_lora_rank"),
                        rope_dim=fields.number("qk_rope_head_dim"))
        return KVShape((layer,) * layers)
    own = layers - fields.get("num_kv_shared_layers", 0)
    windowed = windows(fields)
    result = []
    for i in range(layers):
        # A sharing layer reads the last layer of its own kind (windowed or full) that still has a cache of its own.
        source_layer = None if i < own else max((j for j in range(own) if windowed[j] == windowed[i]), default=None)
        if i >= own and source_layer is None:
            raise BadRequest(f"num_kv_shared_layers = {layers - own} leaves layer {i} no earlier layer of its kind to "
                             "read from; give fewer.")
        result.append(LayerKV(fields.num_kv_heads, fields.head_dim, windowed[i], shared_with=source_layer))
    return KVShape(tuple(result))


def model_shape(source: Mapping | str | Path, name: str | None = None) -> ModelShape:
    """The shapes of the model that a config describes; refused in one sentence where the config is not understood."""
    from labkit.plan.layers import block_matrices
    fields = Fields(source)
    kind = fields.kind
    hidden, vocab = fields.number("hidden_size"), fields.number("vocab_size")
    tied = bool(fields.get("tie_word_embeddings", kind.tied))
    shape = kv_shape(fields)
    matrices = [Matrix("embedding", "embedding", vocab, hidden)]
    if kind.positions:
        matrices.append(Matrix("positions", "embedding", fields.number("max_position_embeddings"), hidden))
    for i in range(shape.num_layers):
        matrices.extend(block_matrices(fields, i))
    matrices.append(Matrix("final_norm", "vectors", 1, hidden * (2 if kind.norm_bias else 1)))
    if not tied:
        matrices.append(Matrix("head", "head", vocab, hidden))
    dtype = str(fields.get("torch_dtype", fields.get("dtype", "bfloat16"))).removeprefix("torch.")
    return ModelShape(
        name=name or str(fields.get("_name_or_path", fields.architecture)) or fields.architecture,
        architecture=fields.architecture, hidden_size=hidden, vocab_size=vocab,
        num_heads=fields.number("num_attention_heads"),
        intermediate_size=fields.get("intermediate_size", 4 * hidden), matrices=tuple(matrices), kv=shape, tied=tied,
        dtype=_DTYPES.get(dtype, "bf16"), max_positions=fields.get("max_position_embeddings"),
        value_dim=fields.get("v_head_dim"),
        num_experts=fields.get("num_local_experts", fields.get("num_experts", fields.get("n_routed_experts", 0))) or 0)
