"""Predict the memory of a model from its shapes, and how many sequences fit a budget.

    total = weights (recipe) + KV cache (format, tokens, sequences) + run-time overhead

The KV cache is counted without padding, and also in pages of 16 tokens. The overhead is
that of one prefill chunk or of one decode step for all sequences, whichever is larger.
Results are in bytes; the text shows MiB and GiB. Limitation: a run takes more than the
total if it allocates its cache in advance, or if the allocator fragments memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from labkit.errors import BadRequest, whole_number
from labkit.lab.plan.known_models import known_config
from labkit.lab.plan.runtime import Runtime, runtime_bytes
from labkit.plan.kv import KVShape, kv_bytes, kv_bytes_per_token
from labkit.plan.shapes import ModelShape, model_shape
from labkit.plan.units import SHORT_NAMES, format_bytes, parse_bytes
from labkit.plan.weights import bits_per_weight, weight_bytes

PAGE_TOKENS = 16
PREFILL_CHUNK = 2048  # longer prompts are prefilled in chunks of this many tokens


def resolve(model) -> ModelShape:
    """Return the shapes of a model.

    `model`: the name of a known model, a config.json (path, folder or dict), the
    ModelConfig of a loaded model, or a ModelShape. Raises BadRequest for anything else.
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
    """Return the memory of a run in bytes, and how many sequences fit a budget.

    `model`: as for `resolve`. `tokens`: per sequence. `recipe`: the format of the
    weights: fp32, bf16, int8, int4, a number format or a GGUF type. `kv_format`: the
    format of the cache. Both default to the dtype of the checkpoint; a quantized
    checkpoint needs both. `budget`: bytes, or a text such as "16GiB". Raises BadRequest for a value that is not valid.
    """
    whole_number(tokens, "tokens", 1)
    whole_number(sequences, "sequences", 1)
    shape = resolve(model)
    if shape.quantization and (recipe is None or kv_format is None):
        raise BadRequest(
            f"The checkpoint of {shape.name} is quantized ({shape.quantization}), and the plan does "
            "not read its formats; give the formats of the weights and of the cache: recipe (such "
            "as int4) and kv_format (such as bf16)."
        )
    recipe, kv_format = recipe or shape.dtype, kv_format or shape.dtype
    weights = weight_bytes(shape, recipe)
    compute = SHORT_NAMES.get(recipe, recipe)

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
        "max_sequences": None if limit is None else bisect_right(range(1, 2**40), limit, key=total),
        "beyond_context": shape.max_positions is not None and tokens > shape.max_positions,
        "max_positions": shape.max_positions,
    }


def render(result: dict) -> str:
    """Format a plan as text, with one line per item."""
    cache = f"{result['sequences']} x {result['tokens']:,} tokens in {result['kv_format']}"
    per_token = f"{result['kv_bytes_per_token']:,.10g} B per further token"
    bits = f"{result['bits_per_weight']:.2f} bits per weight"
    rows = [
        ("weights", "weight_bytes", f"{result['recipe']}, {bits}"),
        ("KV cache", "kv_bytes", f"{cache}, {per_token}"),
        (f"  in pages of {PAGE_TOKENS}", "kv_bytes_paged", "if the cache is paged"),
        ("  windows ignored", "kv_bytes_without_windows", "if a runtime keeps every token"),
        ("activations", "activation_bytes", f"{PREFILL_CHUNK} prompt tokens or one decode step"),
        ("logits", "logit_bytes", "model dtype and a float32 copy"),
        ("workspace", "workspace_bytes", "of the matrix products"),
        ("total", "total_bytes", "weights + KV cache + activations + logits + workspace"),
    ]
    if result["kv_bytes_without_windows"] == result["kv_bytes"]:
        del rows[3]
    active, parameters = result["active_parameters"], result["parameters"]
    used = f" ({active:,} per token)" if active != parameters else ""
    lines = [f"{result['model']}: {parameters:,} parameters{used}, {result['layers']} layers"]
    lines += [f"  {name:<17} {format_bytes(result[key]):>12}   {note}" for name, key, note in rows]
    if result["budget_bytes"] is not None:
        budget = format_bytes(result["budget_bytes"])
        lines.append(f"  {result['max_sequences']:,} such sequences fit into {budget}")
    if result["beyond_context"]:
        longest = f"the model's context of {result['max_positions']:,}"
        lines.append(f"  note: {result['tokens']:,} tokens exceed {longest}")
    return "\n".join(lines)
