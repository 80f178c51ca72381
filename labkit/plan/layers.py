"""The weight matrices of one transformer layer, from the fields of its config."""

from __future__ import annotations

from labkit.plan.shapes import Matrix


def block_matrices(fields, layer: int) -> list[Matrix]:
    """Attention, feed-forward part, norms and biases of layer `layer`; `fields` is a hub_config.Fields."""
    matrices, vectors = (_latent_attention if fields.get("kv_lora_rank") is not None else _attention)(fields)
    more, more_vectors = _experts(fields, layer) if is_sparse(fields, layer) else _mlp(fields)
    vectors += more_vectors
    norm = fields.number("hidden_size") * (2 if fields.kind.norm_bias else 1)
    vectors += fields.kind.norms * norm
    placed = [Matrix(name, "router" if "router" in name else "blocks", rows, columns, layer, count, active)
              for name, rows, columns, count, active in matrices + more]
    return [*placed, Matrix("vectors", "vectors", 1, vectors, layer)]


def is_sparse(fields, layer: int) -> bool:
    """Whether this layer has experts; some models keep their first layers, or every n-th, dense."""
    if not fields.kind.experts or layer in fields.get("mlp_only_layers", ()):
        return False
    if layer < fields.get("first_k_dense_replace", 0):
        return False
    return (layer + 1) % fields.get("decoder_sparse_step", 1) == 0


def _attention(fields):
    hidden, kind = fields.number("hidden_size"), fields.kind
    queries = fields.number("num_attention_heads") * fields.head_dim
    keys = fields.num_kv_heads * fields.head_dim
    matrices = [("q", queries, hidden, 1, None), ("k", keys, hidden, 1, None), ("v", keys, hidden, 1, None),
                ("o", hidden, queries, 1, None)]
    stated = bool(fields.get("attention_bias", False))
    vectors = (queries + 2 * keys) * (kind.qkv_bias or stated) + hidden * (kind.o_bias or stated)
    vectors += 2 * fields.head_dim * kind.qk_norm + fields.number("num_attention_heads") * kind.sinks
    return matrices, vectors


def _latent_attention(fields):
    """MLA: queries and KV pass through low-rank latents; only the KV latent and one rotary key are cached."""
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    latent, rope = fields.number("kv_lora_rank"), fields.number("qk_rope_head_dim")
    plain, value = fields.number("qk_nope_head_dim"), fields.number("v_head_dim")
    query_rank = fields.get("q_lora_rank")
    matrices, vectors = [], latent
    if query_rank is None:
        matrices.append(("q", heads * (plain + rope), hidden, 1, None))
    else:
        matrices += [("q_a", query_rank, hidden, 1, None), ("q_b", heads * (plain + rope), query_rank, 1, None)]
        vectors += query_rank
    matrices += [("kv_a", latent + rope, hidden, 1, None), ("kv_b", heads * (plain + value), latent, 1, None),
                 ("o", hidden, heads * value, 1, None)]
    return matrices, vectors


def _mlp(fields, inner: int | None = None):
    hidden, kind = fields.number("hidden_size"), fields.kind
    inner = inner or fields.get("intermediate_size", 4 * hidden)
    matrices = [("gate", inner, hidden, 1, None)] if kind.gated else []
    matrices += [("up", inner, hidden, 1, None), ("down", hidden, inner, 1, None)]
    bias = kind.mlp_bias or bool(fields.get("mlp_bias", False))
    return matrices, ((1 + kind.gated) * inner + hidden) * bias


def _experts(fields, layer: int):
    """A router, E experts of which a token uses a few, and (Qwen2-MoE, DeepSeek) shared ones that every token uses."""
    hidden, kind = fields.number("hidden_size"), fields.kind
    key = next((k for k in ("num_local_experts", "num_experts", "n_routed_experts") if fields.get(k)), "num_experts")
    experts = fields.number(key)
    active = fields.get("num_experts_per_tok") or fields.number("experts_per_token")
    inner = fields.get("moe_intermediate_size") or fields.number("intermediate_size")
    matrices = [("router", experts, hidden, 1, None), ("experts.gate", inner, hidden, experts, active),
                ("experts.up", inner, hidden, experts, active), ("experts.down", hidden, inner, experts, active)]
    vectors = 0
    if kind.expert_bias:
        vectors += experts * (1 + 2 * inner + hidden)
    if fields.architecture == "deepseek_v3":
        vectors += experts                                     # a bias that balances the load
    shared = fields.get("shared_expert_intermediate_size") or inner * fields.get("n_shared_experts", 0)
    if shared:
        more, _ = _mlp(fields, shared)
        matrices += [(f"shared.{name}", *rest) for name, *rest in more]
        if fields.architecture == "qwen2_moe":
            matrices.append(("shared.router", 1, hidden, 1, None))
    return matrices, vectors
