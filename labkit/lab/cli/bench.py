"""`labkit bench …`: compare arms, with ratios and their intervals."""

from __future__ import annotations

from typing import Annotated

from typer import Option, Typer

from labkit.lab.cli.answer import Device, Json, Model, Recipe, Threads, answer, parse_length, say

bench = Typer(
    help="Compare arms, interleaved in one run.",
    epilog="Example: labkit bench decode --formats fp32,bf16",
    rich_markup_mode=None,
    no_args_is_help=False,
)

Formats = Annotated[str, Option(help="Recipes and number formats, such as fp32,int4.")]
Peers = Annotated[str, Option(help="Libraries to compare with: transformers, llama.cpp, torchao …")]
PromptTokens = Annotated[int, Option(min=1, help="Number of prompt tokens.")]
Kernels = Annotated[str, Option(help="auto, native (labkit's own) or torch (PyTorch's operators).")]
Repeats = Annotated[int, Option(min=1, help="Rounds; every arm runs once per round.")]


@bench.command()
def decode(
    formats: Formats = "fp32,bf16",
    peers: Peers = "",
    model: Model = "default",
    prompt_tokens: PromptTokens = 128,
    new_tokens: Annotated[int, Option(min=2, help="Number of generated tokens.")] = 128,
    repeats: Repeats = 3,
    device: Device = "cpu",
    threads: Threads = None,
    kernels: Kernels = "auto",
    explain: Annotated[bool, Option("--explain", help="Show each part of a step.")] = False,
    as_json: Json = False,
) -> None:
    """Measure time per output token, tok/s, and the share of the read bandwidth.

    \b
    Example:  labkit bench decode --formats fp32,bf16 --peers transformers --threads 2
    """
    from labkit.lab.bench.arms import Load
    from labkit.lab.bench.decode import render, run

    arms = (_names(formats), _names(peers), model)
    load = Load(*arms, prompt_tokens, new_tokens, repeats, threads, device, kernels)
    result = run(load, explain=explain, on_progress=say)
    answer(result, as_json, render(result))


@bench.command()
def prefill(
    formats: Formats = "fp32,bf16",
    peers: Peers = "",
    model: Model = "default",
    prompt_tokens: PromptTokens = 512,
    repeats: Repeats = 3,
    device: Device = "cpu",
    threads: Threads = None,
    kernels: Kernels = "auto",
    as_json: Json = False,
) -> None:
    """Measure the time to the first token, and prompt tokens per second.

    \b
    Example:  labkit bench prefill --formats fp32,bf16 --prompt-tokens 512
    """
    from labkit.lab.bench.arms import Load
    from labkit.lab.bench.prefill import render, run

    arms = (_names(formats), _names(peers), model)
    load = Load(*arms, prompt_tokens, 1, repeats, threads, device, kernels)
    result = run(load, on_progress=say)
    answer(result, as_json, render(result))


@bench.command("kernels")
def kernels_(
    formats: Formats = "fp32,bf16,int8,int4",
    model: Model = "default",
    rows: Annotated[int, Option(min=1, help="Rows (tokens) multiplied at once.")] = 1,
    repeats: Repeats = 7,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Compare kernels on the products of one layer.

    \b
    Example:  labkit bench kernels --formats bf16,int4 --rows 5
    """
    from labkit.lab.bench.kernels import render, run

    result = run(model, _names(formats), rows, threads, repeats, device, say)
    answer(result, as_json, render(result))


@bench.command()
def speculate(
    arms: Annotated[str, Option(help="DRAFTER:TASK,…  [default: ten arms]")] = "",
    recipe: Recipe = "bf16",
    model: Model = "default",
    prompts: Annotated[int, Option(min=1, help="Prompts per task.")] = 4,
    new_tokens: Annotated[int, Option(min=2, help="Maximum number of new tokens per prompt.")] = 64,
    draft_length: Annotated[str, Option(help="Tokens per draft, or auto.")] = "",
    repeats: Repeats = 3,
    device: Device = "cpu",
    threads: Threads = None,
    kernels: Kernels = "auto",
    as_json: Json = False,
) -> None:
    """Measure drafters on tasks, against plain decoding of the same weights.

    \b
    Example:  labkit bench speculate --arms lookup:edit,int4_g32_zp:chat --recipe bf16
    """
    from labkit.lab.bench.speculate import ARMS, Settings, render, run

    length = parse_length(draft_length) if draft_length else None
    counts = (prompts, new_tokens, repeats, length)
    settings = Settings(_names(arms) or ARMS, recipe, model, *counts, threads, device, kernels)
    result = run(settings, on_progress=say)
    answer(result, as_json, render(result))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
