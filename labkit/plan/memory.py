"""What a model takes in memory, from its shapes alone, and what fits into a budget.

    total = weights (recipe) + KV cache (format, tokens, sequences) + run-time overhead (one step)
The cache is the ideal; beside it stands what pages of 16 tokens take. The overhead is that of one prefill chunk
and of one decode step for all sequences, whichever is more. Every figure is in bytes; tables say MiB and GiB.
When it loses: a runtime that reserves its cache up front, or a fragmenting allocator, takes more than the total.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from labkit.errors import BadRequest
from labkit.plan.hub_config import model_shape
from labkit.plan.known_models import known_config
from labkit.plan.kv import KVShape, LayerKV, kv_bytes, kv_bytes_per_token
from labkit.plan.runtime import runtime_bytes
from labkit.plan.shapes import ModelShape
from labkit.plan.units import format_bytes, parse_bytes
from labkit.plan.weights import bits_per_weight, weight_bytes

__all__ = ["KVShape", "LayerKV", "kv_bytes", "kv_bytes_per_token", "plan", "render", "resolve"]

PAGE_TOKENS = 16
PREFILL_CHUNK = 2048                     # longer prompts are prefilled in chunks of this many tokens


def resolve(model) -> ModelShape:
    """A ModelShape from a name of the table, a config.json (path, folder or dict), or a loaded model's config."""
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, Mapping):
        return model_shape(model)
    if hasattr(model, "num_kv_heads") and hasattr(model, "kv_shape"):
        return model_shape(_hub_fields(model))
    if isinstance(model, Path) or str(model).endswith(".json"):
        return model_shape(model)
    try:
        return model_shape(known_config(str(model)))
    except BadRequest:
        if Path(str(model)).exists():
            return model_shape(model)
        raise


def _hub_fields(config) -> dict:
    """The hub's words for a labkit ModelConfig; its architecture says which biases and norms there are."""
    fields = {"model_type": config.architecture, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
              "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
              "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
              "intermediate_size": config.intermediate_size, "tie_word_embeddings": config.tie_embeddings,
              "max_position_embeddings": config.max_positions,
              "attention_bias": config.o_bias, "mlp_bias": config.mlp_bias}
    if config.windows is not None:
        fields["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
        fields["sliding_window"] = next((w for w in config.windows if w is not None), None)
    for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        if getattr(config, key, None):
            fields[key] = getattr(config, key)
    return fields


def plan(model, tokens: int = 4096, sequences: int = 1, recipe: str | None = None, kv_format: str | None = None,
         budget: str | int | None = None) -> dict:
    """Bytes of `sequences` sequences of `tokens` tokens each, and how many would fit into `budget`.

    `model`: a known name, a config.json, a dict, or a ModelShape. `recipe`: fp32, bf16, int8, int4, a number
    format or a GGUF type (default: the checkpoint's own dtype). `kv_format` likewise for the cache.
    """
    for name, value in (("tokens", tokens), ("sequences", sequences)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest(f"{name} is {value!r}; a plan needs a whole number of at least 1.")
    shape = resolve(model)
    recipe, kv_format = recipe or shape.dtype, kv_format or shape.dtype
    weights = weight_bytes(shape, recipe)
    compute = recipe if recipe in ("fp32", "fp16") else ("fp32" if recipe == "float32" else "bf16")

    def overhead(count: int):
        steps = (runtime_bytes(shape, min(tokens, PREFILL_CHUNK), 1, compute),
                 runtime_bytes(shape, 1, count, compute))
        return max(steps, key=lambda runtime: runtime.total)

    def total(count: int) -> int:
        return weights + int(kv_bytes(shape.kv, tokens, count, kv_format)) + overhead(count).total

    limit = None if budget is None else parse_bytes(budget)
    runtime = overhead(sequences)
    return {
        "model": shape.name, "architecture": shape.architecture, "parameters": shape.parameters,
        "active_parameters": shape.active_parameters, "layers": shape.num_layers, "recipe": recipe,
        "kv_format": kv_format, "tokens": tokens, "sequences": sequences,
        "bits_per_weight": round(bits_per_weight(shape, recipe), 4),
        "weight_bytes": weights,
        "kv_bytes_per_token": kv_bytes_per_token(shape.kv, kv_format),
        "kv_bytes": kv_bytes(shape.kv, tokens, sequences, kv_format),
        "kv_bytes_paged": kv_bytes(shape.kv, tokens, sequences, kv_format, page=PAGE_TOKENS),
        "kv_bytes_without_windows": kv_bytes(without_windows(shape.kv), tokens, sequences, kv_format),
        "activation_bytes": runtime.activations, "logit_bytes": runtime.logits, "workspace_bytes": runtime.workspace,
        "total_bytes": total(sequences),
        "budget_bytes": limit,
        "max_sequences": None if limit is None else _largest(total, limit),
        "beyond_context": shape.max_positions is not None and tokens > shape.max_positions,
        "max_positions": shape.max_positions,
    }


def without_windows(shape: KVShape) -> KVShape:
    """The same model in a cache that keeps every token in every layer, as simple runtimes do."""
    return KVShape(tuple(LayerKV(layer.num_kv_heads, layer.head_dim, None, 0, layer.latent_dim, layer.rope_dim,
                                 layer.shared_with) for layer in shape.layers))


def _largest(total, limit: int) -> int:
    """The most sequences whose total stays within the limit; 0 where not even one does."""
    if total(1) > limit:
        return 0
    high = 1
    while total(high) <= limit and high < 2**40:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle) <= limit else (low, middle)
    return low


def render(result: dict) -> str:
    """The plan as text: one line an item, unit named."""
    per_token = result["kv_bytes_per_token"]
    rows = [
        ("weights", result["weight_bytes"], f"{result['recipe']}, {result['bits_per_weight']:.2f} bits a weight"),
        ("KV cache", result["kv_bytes"], f"{result['sequences']} x {result['tokens']:,} tokens in "
                                         f"{result['kv_format']}, {per_token:,.10g} B per further token"),
        (f"  in pages of {PAGE_TOKENS}", result["kv_bytes_paged"], "what a paged cache takes instead"),
        ("activations", result["activation_bytes"], f"one prefill chunk (at most {PREFILL_CHUNK}) or one decode step"),
        ("logits", result["logit_bytes"], "model dtype and a float32 copy"),
        ("workspace", result["workspace_bytes"], "of the matrix products"),
        ("total", result["total_bytes"], "weights + KV cache + activations + logits + workspace"),
    ]
    if result["kv_bytes_without_windows"] != result["kv_bytes"]:
        rows.insert(3, ("  windows ignored", result["kv_bytes_without_windows"], "where a runtime keeps every token"))
    active = result["active_parameters"]
    lines = [f"{result['model']}: {result['parameters']:,} parameters"
             + (f" ({active:,} a token)" if active != result["parameters"] else "") + f", {result['layers']} layers"]
    lines += [f"  {name:<17} {format_bytes(size):>12}   {note}" for name, size, note in rows]
    if result["budget_bytes"] is not None:
        lines.append(f"  {format_bytes(result['budget_bytes'])} hold {result['max_sequences']:,} such sequences")
    if result["beyond_context"]:
        lines.append(f"  note: {result['tokens']:,} tokens exceed the model's context of {result['max_positions']:,}")
    return "\n".join(lines)
