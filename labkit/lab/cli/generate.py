"""`labkit generate`."""

from __future__ import annotations

import sys
from typing import Annotated

from typer import Option
from typer.core import TyperCommand

from labkit.errors import BadRequest
from labkit.lab.cli import answer as cli
from labkit.lab.cli.answer import Device, Json, Model, Recipe, Threads

DRAFTER = "{drafters}, a number format, or a model's folder, file or hub id."


class Generate(TyperCommand):
    """The command `generate`; its help names the caches and drafters that exist."""

    def get_help(self, ctx) -> str:
        from labkit.cache import CACHES
        from labkit.speculate import DRAFTERS

        names = {"caches": ", ".join(CACHES), "drafters": ", ".join(DRAFTERS)}
        for option in self.params:
            option.help = option.help and option.help.format(**names)
        return super().get_help(ctx)


def generate(
    prompt: Annotated[str, Option(help="The text to answer; - reads it from stdin.")],
    model: Model = "default",
    max_new_tokens: Annotated[int, Option(min=0, help="Maximum number of new tokens.")] = 128,
    raw: Annotated[bool, Option("--raw", help="Use no chat template.")] = False,
    recipe: Recipe = None,
    dtype: Annotated[str | None, Option(help="fp32, bf16 or fp16, instead of a recipe.")] = None,
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, Option(help="Keep the k most likely tokens.")] = None,
    top_p: Annotated[float | None, Option(help="Keep top tokens up to this sum.")] = None,
    min_p: Annotated[float | None, Option(help="Least share of the top token.")] = None,
    seed: Annotated[int, Option(help="Equal seeds give equal texts.")] = 0,
    stop: Annotated[list[str] | None, Option(help="Stop at this text. Can be repeated.")] = None,
    cache: Annotated[str, Option(help="KV cache: {caches}.")] = "contiguous",
    drafter: Annotated[str | None, Option(help=DRAFTER)] = None,
    draft_length: Annotated[str, Option(help="Tokens per draft, or auto.")] = "4",
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """Continue a prompt, and report the time to the first token and per later token.

    \b
    Example:  labkit generate --prompt "Name three colours." --max-new-tokens 32
              labkit generate --raw --prompt "def add(a, b):" --recipe int4 --json
              labkit generate --prompt "Hello!" --drafter int4_g32_zp --draft-length auto
    """
    dtype, length = cli.parse_dtype(dtype), cli.parse_length(draft_length)
    if recipe and dtype:
        raise BadRequest(f"--recipe {recipe} excludes --dtype {dtype}; give one of them")
    import torch

    from labkit.formats import torch_dtype
    from labkit.generate import DrafterFailed, InvalidLogits, Sampling
    from labkit.generate import generate as run_generate
    from labkit.lab.stack.open import open_drafter, open_model

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    cli.use_threads(threads)
    loaded = open_model(model, recipe, device=device, dtype=torch_dtype(dtype) if dtype else None)
    if loaded.tokenizer is None:
        raise BadRequest(f"Model {model!r} has no tokenizer; give a folder that has one")
    options = {"max_new_tokens": max_new_tokens, "sampling": sampling, "cache": cache}
    if drafter is not None:
        options |= {"drafter": open_drafter(drafter, loaded), "draft_length": length}
    if not as_json:
        options["on_token"] = lambda token: print(token.text, end="", flush=True)
    try:
        text = text if raw else loaded.tokenizer.chat(text)
        done = run_generate(loaded, text, stop=tuple(stop or ()), **options)
    except (InvalidLogits, DrafterFailed) as error:
        cli.say(f"labkit: {error}")
        return 1
    if not as_json:
        print()
    if done.ttft_s is not None:
        later = f", then {done.tpot_s * 1e3:.1f} ms per token" if done.tpot_s is not None else ""
        tokens = f"{len(done.tokens)} tokens, {done.stop_reason}"
        cli.say(f"{tokens}; the first after {done.ttft_s * 1e3:.0f} ms{later}")
    keys = ("tokens", "text", "stop_reason", "ttft_s", "tpot_s")
    result = {key: getattr(done, key) for key in keys} | {
        "prompt_tokens": len(done.prompt),
        "model": loaded.name,
        "threads": torch.get_num_threads(),
    }
    if drafter is not None:
        keys = ("drafter", "alpha", "accepted_length")
        result |= done.counts() | {key: getattr(done, key) for key in keys}
        text = (
            "{drafter}: {accepted} of {drafted} drafted tokens accepted in {target_passes} passes"
        )
        cli.say(text.format_map(result))
    cli.answer(result, as_json)
    return 0
