"""Commands about one model: generate, plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from labkit.cli.answer import Device, Json, Model, Threads, answer, parse_length, say, use_threads
from labkit.errors import BadRequest

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def generate(
    prompt: Annotated[str, typer.Option(help="The text to answer; - reads it from the standard input.")],
    model: Model = "default",
    max_new_tokens: Annotated[int, typer.Option(min=0, help="At most so many tokens.")] = 128,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, without the chat template.")] = False,
    recipe: Annotated[str | None, typer.Option(help="Weights: fp32, bf16, int8, int4 or a format.  [default: fp32]")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16, instead of a recipe.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Only the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Only the likeliest tokens up to this mass.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Only tokens this likely relative to the likeliest.")] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal texts.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be given again.")] = None,
    cache: Annotated[str, typer.Option(help="The KV cache: none, contiguous …")] = "contiguous",
    drafter: Annotated[str | None, typer.Option(help="Guess and verify: lookup, int4_g32_zp, a model …")] = None,
    draft_length: Annotated[str, typer.Option(help="Tokens drafted a pass, or auto.")] = "4",
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """Continue a prompt, and say how long the first and the later tokens took.

    \b
    Example:  labkit generate --prompt "Name three colours." --max-new-tokens 32
              labkit generate --raw --prompt "def add(a, b):" --recipe int4 --json
              labkit generate --prompt "Why is the sea salty?" --drafter int4_g32_zp --draft-length auto
    """
    if recipe and dtype:
        raise BadRequest(f"--recipe {recipe} and --dtype {dtype} both say how weights are held; give one of them")
    dtype = DTYPES.get(dtype, dtype)
    if dtype not in (None, *DTYPES.values()):
        raise BadRequest(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES.values())}")
    length = parse_length(draft_length)
    import torch

    from labkit.generate import InvalidLogits, Sampling
    from labkit.generate import generate as run_generate

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    use_threads(threads)
    loaded = _loaded(model, recipe, dtype, device)
    if loaded.tokenizer is None:
        raise BadRequest(f"model {model!r} has no tokenizer, so it cannot read a prompt; give a folder that has one")

    def show(token) -> None:
        print(token.text, end="", flush=True)

    extra, failures = {}, (InvalidLogits,)
    if drafter is not None:
        from labkit.speculate import DrafterFailed
        from labkit.speculate import generate as run_generate

        extra, failures = {"drafter": drafter, "draft_length": length}, (InvalidLogits, DrafterFailed)
    try:
        done = run_generate(
            loaded, text if raw else loaded.tokenizer.chat(text), max_new_tokens=max_new_tokens, sampling=sampling,
            stop=tuple(stop or ()), cache=cache, on_token=None if as_json else show, **extra,
        )  # fmt: skip
    except failures as error:
        say(f"labkit: {error}")
        return 1
    if not as_json:
        print()
    if done.ttft_s is not None:
        tpot = f", then {done.tpot_s * 1e3:.1f} ms a token" if done.tpot_s is not None else ""
        say(f"{len(done.tokens)} tokens, {done.stop_reason}; the first after {done.ttft_s * 1e3:.0f} ms{tpot}")
    result = {"tokens": done.tokens, "text": done.text, "stop_reason": done.stop_reason, "ttft_s": done.ttft_s,
              "tpot_s": done.tpot_s, "prompt_tokens": len(done.prompt), "model": loaded.name,
              "threads": torch.get_num_threads()}  # fmt: skip
    if drafter is not None:
        result |= {"drafter": done.drafter, **done.counts(), "alpha": done.alpha, "accepted_length": done.accepted_length}
        say(f"{done.drafter}: {done.tally.accepted} of {done.tally.drafted} drafted tokens kept in {done.tally.target_passes} passes")
    answer(result, as_json)
    return 0


def _loaded(model: str, recipe: str | None, dtype: str | None, device: str):
    """In a recipe, or as a quantised file holds it, on the fastest kernels there are unless a dtype is asked for."""
    if recipe:
        from labkit.bench.arms import load

        return load(model, recipe, device, "auto")
    import torch

    chosen = getattr(torch, dtype or "float32")
    if model.endswith(".safetensors") and Path(model).is_file():
        from labkit.model.quantized_file import load_quantized

        return load_quantized(model, dtype=chosen, device=device, kernels="auto" if dtype is None else "torch")
    from labkit.model.load import load_model

    return load_model(model, dtype=chosen, device=device)


def plan(
    model: Annotated[str | None, typer.Option(help="A known name, or the default model.")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json as the hub has it, instead of --model.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens a sequence.")] = 4096,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    recipe: Annotated[str | None, typer.Option(help="Weights: fp32, bf16, int8, int4, a format, a GGUF type.")] = None,
    kv_format: Annotated[str | None, typer.Option(help="KV cache: bf16, fp16, int8, int4 …")] = None,
    budget: Annotated[str | None, typer.Option(help="Memory there is, as 16GiB.")] = None,
    as_json: Json = False,
) -> int:
    """Weights, KV cache and working memory in bytes, and how many sequences fit. Exits 1 where not one does.

    \b
    Example:  labkit plan --model llama-3.1-8b --tokens 8192 --recipe int4 --budget 16GiB
    """
    from labkit.plan import memory

    if model and config:
        raise BadRequest(f"--model {model} and --config {config} name two models; give one of them")
    if config is not None and not config.is_file():
        raise BadRequest(f"there is no file {str(config)!r}; --config wants a model's config.json")
    subject = str(config) if config is not None else model or "default"
    result = memory.plan(subject, tokens, sequences, recipe, kv_format, budget)
    answer(result, as_json, memory.render(result))
    return 1 if result["max_sequences"] == 0 else 0
