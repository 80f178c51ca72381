"""`labkit plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from labkit.errors import BadRequest
from labkit.lab.cli.answer import Json, answer


def plan(
    model: Annotated[str | None, Option(help="A known name, or the default model.")] = None,
    config: Annotated[Path | None, Option(help="A config.json, instead of --model.")] = None,
    tokens: Annotated[int, Option(min=1, help="Tokens per sequence.")] = 4096,
    sequences: Annotated[int, Option(min=1, help="Sequences at once.")] = 1,
    recipe: Annotated[str | None, Option(help="fp32, int4, a format, a GGUF type.")] = None,
    kv_format: Annotated[str | None, Option(help="KV cache: bf16, fp16, int8, int4 …")] = None,
    budget: Annotated[str | None, Option(help="Available memory, such as 16GiB.")] = None,
    as_json: Json = False,
) -> int:
    """Show the memory of weights, KV cache and arithmetic, and how many sequences fit.

    Exits 1 if the sequences do not fit into the budget.

    \b
    Example:  labkit plan --model llama-3.1-8b --tokens 8192 --recipe int4 --budget 16GiB
    """
    from labkit.lab.plan import memory

    if model and config:
        raise BadRequest(f"--model {model} and --config {config} are two models; give one of them")
    if config is not None and not (config / "config.json" if config.is_dir() else config).exists():
        raise BadRequest(f"There is no file {str(config)!r}; give a model's config.json")
    name = str(config or model or "default")
    result = memory.plan(name, tokens, sequences, recipe, kv_format, budget)
    answer(result, as_json, memory.render(result))
    fits = result["max_sequences"]
    return 1 if fits is not None and fits < sequences else 0
