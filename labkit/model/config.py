"""The shape of a decoder, read from what checkpoints say about themselves.

A checkpoint states its shape in a `config.json` (the hub's format) or in GGUF metadata. Both are turned into
one frozen `ModelConfig`; nothing else in labkit reads either. `head_dim` is taken as stated and derived as
hidden / heads only where nothing is said (Qwen3-0.6B: 128, where hidden / heads would be 64).
What the decoder cannot compute is refused by name here, before a single weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from labkit.errors import BadRequest
from labkit.model import gemma
from labkit.model.rope import RopeConfig
from labkit.model.windows import layer_windows

if TYPE_CHECKING:
    from labkit.model.gguf_file import GGUFFile
    from labkit.plan.memory import KVShape

ARCHITECTURES = {  # what a config.json leaves out where it means the architecture's own default
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
    "gemma3_text": gemma.DEFAULTS,
}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3_text": "Gemma3"}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder; `from_hf` and `from_gguf` read them, `to_hf` writes them."""

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
    windows: tuple[int | None, ...] | None = None  # per layer; None: every layer sees everything
    local_rope: RopeConfig | None = None  # of windowed layers, where it is another (Gemma)
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    latent_dim: int | None = None  # MLA: the cached vector's width; head_dim is then that of unrotated keys and values
    rope_dim: int = 0  # MLA: width of the one rotated key
    kv_shared: tuple[int | None, ...] | None = None  # per layer: the earlier layer whose keys and values it reads
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def __post_init__(self):
        check_architecture(self.architecture)
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "intermediate_size", "max_positions"):  # fmt: skip
            value = getattr(self, name)
            unlimited = value is None and name == "max_positions"
            if not unlimited and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
                raise BadRequest(f"{name} is {value!r}: the configuration of a model gives a whole number from 1 up.")
        if isinstance(self.norm_eps, bool) or not isinstance(self.norm_eps, Real) or not self.norm_eps >= 0:
            raise BadRequest(f"norm_eps is {self.norm_eps!r}: give a number from 0 up, such as 1e-6.")
        if self.num_heads % self.num_kv_heads:
            raise BadRequest(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads: "
                "the first must be a multiple of the second."
            )
        if self.windows is not None and len(self.windows) != self.num_layers:
            raise BadRequest(
                f"{len(self.windows)} windows were given for {self.num_layers} layers: give one a layer, or none."
            )
        shared = self.kv_shared or (None,) * self.num_layers
        early = all(source is None or (source < i and shared[source] is None) for i, source in enumerate(shared))
        if not early or len(shared) != self.num_layers or (any(shared) and self.latent_dim):
            raise BadRequest(f"kv_shared is {shared}: one entry a layer, None or an earlier layer whose own it reads.")
        if (self.latent_dim is None) != (self.rope_dim == 0):
            raise BadRequest("latent_dim and rope_dim go together (latent attention): give both or none.")
        if self.head_dim % 2 or self.rope_dim % 2:
            raise BadRequest(
                f"head_dim {self.head_dim} is odd: rotary embedding turns pairs of channels, so it must be even."
            )

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def is_gemma(self) -> bool:
        return self.architecture == "gemma3_text"

    @property
    def context(self) -> int:
        """Tokens that may be in use at once. Dynamic rotary settings state the length before stretching."""
        return int(self.max_positions * self.rope.factor) if self.rope.kind == "dynamic" else self.max_positions

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def shared_with(self, layer: int) -> int | None:
        return self.kv_shared[layer] if self.kv_shared else None

    @property
    def kv_shape(self) -> KVShape:
        from labkit.plan.memory import KVShape, LayerKV

        heads, width = (self.num_kv_heads, self.head_dim) if self.latent_dim is None else (1, self.latent_dim)
        kind = lambda i: LayerKV(heads, width, self.window(i), 0, self.latent_dim, self.rope_dim, self.shared_with(i))  # noqa: E731
        return KVShape(tuple(kind(i) for i in range(self.num_layers)))

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """From the dictionary of a `config.json` (older and newer spellings of the rotary settings alike)."""
        architecture = check_architecture(config.get("model_type"))
        given = ARCHITECTURES[architecture] | config
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            if not isinstance(given.get(key), int) or given[key] < 1:
                raise BadRequest(f"the configuration says {key} = {given.get(key)!r}: a whole number from 1 up is needed.")
        given.setdefault("max_position_embeddings", None)
        heads, layers = given["num_attention_heads"], given["num_hidden_layers"]
        head_dim = given.get("head_dim")
        head_dim = given["hidden_size"] // heads if head_dim is None else head_dim
        act, ours = ("hidden_activation", "gelu_pytorch_tanh") if architecture == "gemma3_text" else ("hidden_act", "silu")
        if (given.get(act) or ours) != ours:
            raise BadRequest(
                f"the activation {given[act]!r} is not one that labkit.model computes ({ours!r} for {architecture}): "
                "labkit.hf runs the model through transformers."
            )
        bias = bool(given.get("attention_bias", False)) and architecture in ("llama", "qwen3", "gemma3_text")
        eos = given.get("eos_token_id")
        own = {"rope": RopeConfig.from_hf(given), "windows": layer_windows(architecture, given, layers)} \
            if architecture != "gemma3_text" else gemma.fields_from_hf(given, layers)  # fmt: skip
        return cls(
            architecture=architecture,
            vocab_size=given["vocab_size"],
            hidden_size=given["hidden_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads if given.get("num_key_value_heads") is None else given["num_key_value_heads"],
            head_dim=head_dim,
            intermediate_size=given["intermediate_size"],
            norm_eps=given.get("rms_norm_eps", 1e-6),
            max_positions=given["max_position_embeddings"],
            tie_embeddings=bool(given.get("tie_word_embeddings", False)),
            qkv_bias=bias or architecture == "qwen2",
            o_bias=bias,
            mlp_bias=bool(given.get("mlp_bias", False)) and architecture == "llama",
            qk_norm=architecture in ("qwen3", "gemma3_text"),
            bos_id=given.get("bos_token_id"),
            eos_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
            pad_id=given.get("pad_token_id"),
            **own,
        )

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> ModelConfig:
        from labkit.model.gguf_config import config_from_gguf

        return config_from_gguf(file)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that transformers reads for this shape: the inverse of `from_hf`."""
        config = {
            "architectures": [CLASSES[self.architecture] + "ForCausalLM"],
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
            "eos_token_id": list(self.eos_ids) if len(self.eos_ids) > 1 else next(iter(self.eos_ids), None),
            "pad_token_id": self.pad_id,
            **self.rope.to_hf(),
        }
        if self.architecture in ("llama", "qwen3", "gemma3_text"):
            config["attention_bias"] = self.qkv_bias
        if self.is_gemma:
            return config | gemma.fields_to_hf(self)
        if self.architecture == "llama":
            config["mlp_bias"] = self.mlp_bias
        else:
            widths = sorted({w for w in self.windows or () if w is not None})
            config["sliding_window"] = widths[0] if widths else None
        if self.architecture in ("qwen2", "qwen3"):
            config["use_sliding_window"] = bool(widths)
            config["layer_types"] = [
                "full_attention" if self.window(i) is None else "sliding_attention" for i in range(self.num_layers)
            ]
        return config


def check_architecture(name: str | None) -> str:
    if name not in ARCHITECTURES:
        raise BadRequest(
            f"the architecture {name!r} is not one that labkit.model computes ({', '.join(ARCHITECTURES)}): "
            "labkit.hf runs most other models through transformers."
        )
    return name
