"""Predict the memory of a model from its shapes alone, and what fits into a budget.

    total = weights (recipe) + KV cache (format, tokens, sequences) + run-time overhead

The KV cache is given without padding, and also in pages of 16 tokens. The overhead is
that of one prefill chunk or of one decode step for all sequences, whichever is larger.
Results are in bytes; tables show MiB and GiB. Limitation: a runtime that reserves its
cache up front, or an allocator that fragments memory, takes more than the total.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from labkit.errors import BadRequest, whole_number
from labkit.lab.plan.known_models import known_config
from labkit.lab.plan.runtime import Runtime, runtime_bytes
from labkit.plan.kv import KVShape, kv_bytes, kv_bytes_per_token
from labkit.plan.shapes import ModelShape, model_shape
from labkit.plan.units import format_bytes, parse_bytes
from labkit.plan.weights import bits_per_weight, weight_bytes

PAGE_TOKENS = 16
PREFILL_CHUNK = 2048  # longer prompts are prefilled in chunks of this many tokens


def resolve(model) -> ModelShape:
    """Return the shapes of a model.

    `model`: a name in the table of known models, a config.json (path, folder or dict),
    the ModelConfig of a loaded model, or a ModelShape. Raises BadRequest for any other.
    """
    if isinstance(model, ModelShape):
        return model
    if hasattr(model, "to_hf"):
        return model_shape(model.to_hf())
    if isinstance(model, Mapping | Path) or str(model).endswith(".json"):
        return model_shape(model)
    try:
        return model_shape(known_config(str(model)))
    except BadRequest:
        if Path(str(model)).exists():
            return model_shape(model)
        raise


def plan(
    model,
    tokens: int = 4096,
    sequences: int = 1,
    recipe: str | None = None,
    kv_format: str | None = None,
    budget: str | int | None = None,
) -> dict:
    """Return the bytes for `sequences` x `tokens` tokens, and how many fit a budget.

    `model`: as for `resolve`. `recipe`: fp32, bf16, int8, int4, a number format or a
    GGUF type (default: the checkpoint's own dtype). `kv_format`: the same for the
    cache.
    """
    whole_number(tokens, "tokens", 1)
    whole_number(sequences, "sequences", 1)
    shape = resolve(model)
    recipe, kv_format = recipe or shape.dtype, kv_format or shape.dtype
    weights = weight_bytes(shape, recipe)
    compute = {"float32": "fp32", "fp32": "fp32", "fp16": "fp16"}.get(recipe, "bf16")

    def overhead(count: int) -> Runtime:
        prefill = runtime_bytes(shape, min(tokens, PREFILL_CHUNK), 1, compute)
        decode = runtime_bytes(shape, 1, count, compute)
        return max(prefill, decode, key=lambda runtime: runtime.total)

    def total(count: int) -> int:
        return weights + int(kv_bytes(shape.kv, tokens, count, kv_format)) + overhead(count).total

    limit = None if budget is None else parse_bytes(budget)
    runtime = overhead(sequences)
    unbounded = KVShape(tuple(replace(layer, window=None, sinks=0) for layer in shape.kv.layers))
    return {
        "model": shape.name,
        "architecture": shape.architecture,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "layers": shape.num_layers,
        "recipe": recipe,
        "kv_format": kv_format,
        "tokens": tokens,
        "sequences": sequences,
        "bits_per_weight": round(bits_per_weight(shape, recipe), 4),
        "weight_bytes": weights,
        "kv_bytes_per_token": kv_bytes_per_token(shape.kv, kv_format),
        "kv_bytes": kv_bytes(shape.kv, tokens, sequences, kv_format),
        "kv_bytes_paged": kv_bytes(shape.kv, tokens, sequences, kv_format, page=PAGE_TOKENS),
        "kv_bytes_without_windows": kv_bytes(unbounded, tokens, sequences, kv_format),
        "activation_bytes": runtime.activations,
        "logit_bytes": runtime.logits,
        "workspace_bytes": runtime.workspace,
        "total_bytes": total(sequences),
        "budget_bytes": limit,
        "max_sequences": None if limit is None else _largest(total, limit),
        "beyond_context": shape.max_positions is not None and tokens > shape.max_positions,
        "max_positions": shape.max_positions,
    }


def _largest(total: Callable[[int], int], limit: int) -> int:
    """Return the largest number of sequences whose total is within the limit."""
    low, high = 0, 1
    while total(high) <= limit and high < 2**40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if total(middle) <= limit:
            low = middle
        else:
            high = middle
    return low


def render(result: dict) -> str:
    """Format the plan as text: one line per item, with its unit."""
    cache = f"{result['sequences']} x {result['tokens']:,} tokens in {result['kv_format']}"
    per_token = f"{result['kv_bytes_per_token']:,.10g} B per further token"
    bits = f"{result['bits_per_weight']:.2f} bits per weight"
    rows = [
        ("weights", "weight_bytes", f"{result['recipe']}, {bits}"),
        ("KV cache", "kv_bytes", f"{cache}, {per_token}"),
        (f"  in pages of {PAGE_TOKENS}", "kv_bytes_paged", "what a paged cache takes instead"),
        ("  windows ignored", "kv_bytes_without_windows", "if a runtime keeps every token"),
        (
            "activations",
            "activation_bytes",
            f"one prefill chunk (up to {PREFILL_CHUNK} tokens) or one decode step",
        ),
        ("logits", "logit_bytes", "model dtype and a float32 copy"),
        ("workspace", "workspace_bytes", "of the matrix products"),
        ("total", "total_bytes", "weights + KV cache + activations + logits + workspace"),
    ]
    if result["kv_bytes_without_windows"] == result["kv_bytes"]:
        del rows[3]
    active = result["active_parameters"]
    used = f" ({active:,} per token)" if active != result["parameters"] else ""
    lines = [
        f"{result['model']}: {result['parameters']:,} parameters{used}, {result['layers']} layers"
    ]
    for name, key, note in rows:
        lines.append(f"  {name:<17} {format_bytes(result[key]):>12}   {note}")
    if result["budget_bytes"] is not None:
        budget = format_bytes(result["budget_bytes"])
        lines.append(f"  {result['max_sequences']:,} such sequences fit into {budget}")
    if result["beyond_context"]:
        lines.append(
            f"  note: {result['tokens']:,} tokens exceed the model's context of "
            f"{result['max_positions']:,}"
        )
    return "\n".join(lines)
