"""Describe a model as a list of shapes: each weight matrix, and what each layer caches.

All predictions of the plan (bytes, operations, seconds) are sums over this list. A
matrix [rows, columns] maps `columns` inputs to `rows` outputs. It has rows * columns
weights and does two operations per weight and token. A mixture of experts has `count`
copies of a matrix, and each token uses `active` of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from labkit.plan.hub_config import ConfigSource, HubConfig, kv_shape
from labkit.plan.kv import KVShape
from labkit.plan.units import SHORT_NAMES

# Sizes: name -> (rows, columns). The number counts the weights in biases, norms and sinks.
Sizes = dict[str, tuple[int, int]]
Part = tuple[Sizes, int]


@dataclass(frozen=True)
class Matrix:
    """One weight matrix, in `count` copies.

    `part` is "blocks", "embedding", "head", "router", or "vectors" (norms, biases and
    sinks, which keep full precision).
    """

    name: str
    part: str
    rows: int
    columns: int
    layer: int | None = None
    count: int = 1
    active: int | None = None  # copies that one token uses; None: all

    @property
    def parameters(self) -> int:
        """The number of weights in all copies."""
        return self.rows * self.columns * self.count

    @property
    def active_parameters(self) -> int:
        """The number of weights that one token uses."""
        return self.rows * self.columns * (self.count if self.active is None else self.active)


@dataclass(frozen=True)
class ModelShape:
    """The shapes of a decoder-only model.

    `dtype` is that of its checkpoint, or of its unquantized part: bf16, fp16 or fp32.
    """

    name: str
    architecture: str
    hidden_size: int
    vocab_size: int
    num_heads: int
    matrices: tuple[Matrix, ...]
    kv: KVShape
    tied: bool
    dtype: str = "bf16"
    max_positions: int | None = None
    num_experts: int = 0
    quantization: str | None = None  # method of a quantized checkpoint, such as gptq

    @property
    def num_layers(self) -> int:
        return self.kv.num_layers

    @property
    def parameters(self) -> int:
        """The number of weights; a head that is tied to the embedding adds none."""
        return sum(matrix.parameters for matrix in self.matrices)

    @property
    def active_parameters(self) -> int:
        """The number of weights that one token uses; experts that it does not use are left out."""
        return sum(matrix.active_parameters for matrix in self.matrices)

    def part(self, *parts: str) -> Iterator[Matrix]:
        """Iterate over the matrices whose `part` is one of `parts`."""
        return (matrix for matrix in self.matrices if matrix.part in parts)


def model_shape(source: ConfigSource, name: str | None = None) -> ModelShape:
    """Return the shapes of the model that a config describes.

    Raises BadRequest with the name of the field if a field is missing or not valid.
    """
    config = HubConfig(source)
    hidden, vocab = config.number("hidden_size"), config.number("vocab_size")
    matrices = [Matrix("embedding", "embedding", vocab, hidden)]
    if config.architecture == "gpt2":
        positions = config.number("max_position_embeddings")
        matrices.append(Matrix("positions", "embedding", positions, hidden))
    for i in range(config.num_layers):
        matrices += layer_matrices(config, i)
    matrices.append(Matrix("final_norm", "vectors", 1, _norm(config)))
    tied = bool(config.get("tie_word_embeddings", False))
    if not tied:
        matrices.append(Matrix("head", "head", vocab, hidden))
    dtype = str(config.get("torch_dtype", config.get("dtype"))).removeprefix("torch.")
    return ModelShape(
        name=name or str(config.get("_name_or_path") or config.architecture),
        architecture=config.architecture,
        hidden_size=hidden,
        vocab_size=vocab,
        num_heads=config.number("num_attention_heads"),
        matrices=tuple(matrices),
        kv=kv_shape(config),
        tied=tied,
        dtype=SHORT_NAMES.get(dtype, "bf16"),
        max_positions=config.max_positions,
        num_experts=config.num_experts,
        quantization=config.quantization,
    )


def layer_matrices(config: HubConfig, layer: int) -> list[Matrix]:
    """Return the matrices of one layer; norms and biases are one of them."""
    latent, sparse = config.get("kv_lora_rank") is not None, is_sparse(config, layer)
    attention, vectors = (_latent_attention if latent else _attention)(config)
    feed_forward, more = (_experts if sparse else _mlp)(config)
    vectors += more + config.kind.norms * _norm(config)
    matrices = [Matrix("vectors", "vectors", 1, vectors, layer)]
    active = config.get("num_experts_per_tok", config.get("experts_per_token"))
    for name, (rows, columns) in (attention | feed_forward).items():
        part = "router" if "router" in name else "blocks"
        copies = (config.num_experts, active) if name.startswith("experts.") else (1, None)
        matrices.append(Matrix(name, part, rows, columns, layer, *copies))
    return matrices


def is_sparse(config: HubConfig, layer: int) -> bool:
    """Return True if this layer has experts; some models have a few layers without."""
    if not config.kind.experts or layer in config.get("mlp_only_layers", ()):
        return False
    every = config.get("decoder_sparse_step", 1)
    return layer >= config.get("first_k_dense_replace", 0) and (layer + 1) % every == 0


def _norm(config: HubConfig) -> int:
    return config.number("hidden_size") * (2 if "norms" in config.kind.biases else 1)


def _attention(config: HubConfig) -> Part:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    queries, keys = heads * config.head_dim, config.num_kv_heads * config.head_dim
    biases, stated = config.kind.biases, bool(config.get("attention_bias", False))
    vectors = 2 * config.head_dim * config.kind.qk_norm + heads * ("sinks" in biases)
    vectors += (queries + 2 * keys) * ("qkv" in biases or stated)
    vectors += hidden * ("o" in biases or stated)
    key = (keys, hidden)
    return {"q": (queries, hidden), "k": key, "v": key, "o": (hidden, queries)}, vectors


def _latent_attention(config: HubConfig) -> Part:
    """Return the matrices of MLA, which passes queries, keys and values through latents."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    latent, rope = config.number("kv_lora_rank"), config.number("qk_rope_head_dim")
    plain, value = config.number("qk_nope_head_dim"), config.number("v_head_dim")
    rank, queries = config.get("q_lora_rank", 0), heads * (plain + rope)
    sizes = {"q_a": (rank, hidden), "q_b": (queries, rank)} if rank else {"q": (queries, hidden)}
    sizes["kv_a"] = (latent + rope, hidden)
    sizes["kv_b"] = (heads * (plain + value), latent)
    sizes["o"] = (hidden, heads * value)
    return sizes, latent + rank


def _mlp(config: HubConfig) -> Part:
    hidden = config.number("hidden_size")
    gpt2 = config.architecture == "gpt2" and config.get("intermediate_size") is None
    inner = 4 * hidden if gpt2 else config.number("intermediate_size")
    bias = "mlp" in config.kind.biases or bool(config.get("mlp_bias", False))
    return _feed_forward(config, inner), ((1 + config.kind.gated) * inner + hidden) * bias


def _feed_forward(config: HubConfig, inner: int, prefix: str = "") -> Sizes:
    hidden = config.number("hidden_size")
    sizes = {f"{prefix}gate": (inner, hidden)} if config.kind.gated else {}
    return sizes | {f"{prefix}up": (inner, hidden), f"{prefix}down": (hidden, inner)}


def _experts(config: HubConfig) -> Part:
    """Return the router, the experts, and the shared experts that every token uses."""
    hidden, experts = config.number("hidden_size"), config.num_experts
    if not experts:
        config.number("num_experts")  # raises
    if config.get("experts_per_token") is None:
        config.number("num_experts_per_tok")
    inner = config.get("moe_intermediate_size") or config.number("intermediate_size")
    sizes = {"router": (experts, hidden)} | _feed_forward(config, inner, "experts.")
    vectors = experts * (1 + 2 * inner + hidden) if "experts" in config.kind.biases else 0
    if config.architecture == "deepseek_v3":
        vectors += experts  # a bias that balances the load
    shared = config.get("shared_expert_intermediate_size", 0)
    shared = shared or inner * config.get("n_shared_experts", 0)
    if shared:
        sizes |= _feed_forward(config, shared, "shared.")
        if config.architecture == "qwen2_moe":
            sizes["shared.router"] = (1, hidden)
    return sizes, vectors
