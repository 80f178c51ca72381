"""A model as a list of shapes: every weight matrix, and what each layer caches.

Everything that the plan predicts (bytes, operations, seconds) is a sum over this list. A
matrix of [rows, columns] maps `columns` inputs to `rows` outputs: rows * columns weights,
and twice as many operations per token. `count` copies of it exist (experts), of which one
token uses `active`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from labkit.plan.hub_config import ConfigSource, HubConfig, kv_shape
from labkit.plan.kv import KVShape

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Name -> (rows, columns), and the number of weights that are vectors: biases, norms, sinks.
Part = tuple[dict[str, tuple[int, int]], int]


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
    active: int | None = None  # None: all of them

    @property
    def parameters(self) -> int:
        return self.rows * self.columns * self.count

    @property
    def active_parameters(self) -> int:
        return self.rows * self.columns * (self.count if self.active is None else self.active)


@dataclass(frozen=True)
class ModelShape:
    """Shapes of one decoder-only model; `dtype` is that of its checkpoint (bf16, fp16, fp32)."""

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

    @property
    def num_layers(self) -> int:
        return self.kv.num_layers

    @property
    def parameters(self) -> int:
        """Number of weights; a head that is tied to the embedding adds none."""
        return sum(matrix.parameters for matrix in self.matrices)

    @property
    def active_parameters(self) -> int:
        """Number of weights that one token uses (fewer than all in a mixture of experts)."""
        return sum(matrix.active_parameters for matrix in self.matrices)

    def part(self, *parts: str) -> Iterator[Matrix]:
        """Iterate over the matrices of these parts."""
        return (matrix for matrix in self.matrices if matrix.part in parts)

    def query_width(self, layer: int) -> int:
        """Return the numbers in all query heads of a layer: H * D, not the hidden size."""
        kv = self.kv.layers[layer]
        width = kv.head_dim if kv.latent_dim is None else kv.latent_dim + kv.rope_dim
        return self.num_heads * width


def model_shape(source: ConfigSource, name: str | None = None) -> ModelShape:
    """Return the shapes of the model that a config describes; raises BadRequest with the field."""
    config = HubConfig(source)
    hidden, vocab = config.number("hidden_size"), config.number("vocab_size")
    matrices = [Matrix("embedding", "embedding", vocab, hidden)]
    if config.architecture == "gpt2":
        positions = config.number("max_position_embeddings")
        matrices.append(Matrix("positions", "embedding", positions, hidden))
    for i in range(config.num_layers):
        matrices += layer_matrices(config, i)
    norm = hidden * (2 if "norms" in config.kind.biases else 1)
    matrices.append(Matrix("final_norm", "vectors", 1, norm))
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
        dtype=_DTYPES.get(dtype, "bf16"),
        max_positions=config.get("max_position_embeddings"),
        num_experts=config.num_experts,
    )


def layer_matrices(config: HubConfig, layer: int) -> list[Matrix]:
    """Return the attention, the feed-forward part, norms and biases of layer `layer`."""
    latent, sparse = config.get("kv_lora_rank") is not None, is_sparse(config, layer)
    attention, vectors = (_latent_attention if latent else _attention)(config)
    feed_forward, more = _experts(config) if sparse else _mlp(config, _inner(config))
    norm = config.number("hidden_size") * (2 if "norms" in config.kind.biases else 1)
    vectors += more + config.kind.norms * norm
    matrices = [Matrix("vectors", "vectors", 1, vectors, layer)]
    active = config.get("num_experts_per_tok", config.get("experts_per_token"))
    for name, (rows, columns) in (attention | feed_forward).items():
        part = "router" if "router" in name else "blocks"
        copies = (config.num_experts, active) if name.startswith("experts.") else (1, None)
        matrices.append(Matrix(name, part, rows, columns, layer, *copies))
    return matrices


def is_sparse(config: HubConfig, layer: int) -> bool:
    """Return True if this layer has experts; some models keep their first layers dense."""
    if not config.kind.experts or layer in config.get("mlp_only_layers", ()):
        return False
    every = config.get("decoder_sparse_step", 1)
    return layer >= config.get("first_k_dense_replace", 0) and (layer + 1) % every == 0


def _attention(config: HubConfig) -> Part:
    hidden, heads, kind = (
        config.number("hidden_size"),
        config.number("num_attention_heads"),
        config.kind,
    )
    queries, keys = heads * config.head_dim, config.num_kv_heads * config.head_dim
    stated = bool(config.get("attention_bias", False))
    vectors = 2 * config.head_dim * kind.qk_norm + heads * kind.sinks
    vectors += (queries + 2 * keys) * ("qkv" in kind.biases or stated)
    vectors += hidden * ("o" in kind.biases or stated)
    sizes = {
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
    }
    return sizes, vectors


def _latent_attention(config: HubConfig) -> Part:
    """MLA: queries and KV pass through low-rank latents; one latent and one rotary key are cached."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    latent, rope = config.number("kv_lora_rank"), config.number("qk_rope_head_dim")
    plain, value = config.number("qk_nope_head_dim"), config.number("v_head_dim")
    rank = config.get("q_lora_rank")
    queries = heads * (plain + rope)
    sizes = (
        {"q": (queries, hidden)}
        if rank is None
        else {"q_a": (rank, hidden), "q_b": (queries, rank)}
    )
    sizes["kv_a"] = (latent + rope, hidden)
    sizes["kv_b"] = (heads * (plain + value), latent)
    sizes["o"] = (hidden, heads * value)
    return sizes, latent + (rank or 0)


def _inner(config: HubConfig) -> int:
    return config.get("intermediate_size", 4 * config.number("hidden_size"))


def _mlp(config: HubConfig, inner: int) -> Part:
    hidden, kind = config.number("hidden_size"), config.kind
    sizes = {"gate": (inner, hidden)} if kind.gated else {}
    sizes |= {"up": (inner, hidden), "down": (hidden, inner)}
    bias = "mlp" in kind.biases or bool(config.get("mlp_bias", False))
    return sizes, ((1 + kind.gated) * inner + hidden) * bias


def _experts(config: HubConfig) -> Part:
    """A router, E experts of which a token uses a few, and shared ones that every token uses."""
    hidden, experts = config.number("hidden_size"), config.num_experts
    if not experts:
        config.number("num_experts")  # raises
    if config.get("experts_per_token") is None:
        config.number("num_experts_per_tok")
    inner = config.get("moe_intermediate_size") or config.number("intermediate_size")
    sizes = {"router": (experts, hidden)}
    sizes |= {f"experts.{name}": size for name, size in _mlp(config, inner)[0].items()}
    vectors = experts * (1 + 2 * inner + hidden) if "experts" in config.kind.biases else 0
    if config.architecture == "deepseek_v3":
        vectors += experts  # a bias that balances the load
    shared = config.get("shared_expert_intermediate_size", 0)
    shared = shared or inner * config.get("n_shared_experts", 0)
    if shared:
        sizes |= {f"shared.{name}": size for name, size in _mlp(config, shared)[0].items()}
        if config.architecture == "qwen2_moe":
            sizes["shared.router"] = (1, hidden)
    return sizes, vectors
