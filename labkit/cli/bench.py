"""`labkit bench …`: arm against arm on this machine, with the ratio and its interval."""

from __future__ import annotations

from typing import Annotated

import typer

from labkit.cli.answer import Device, Json, Model, Threads, answer, parse_length, say
from labkit.errors import BadRequest

bench = typer.Typer(
    help="Measure arm against arm, interleaved in one run.",
    epilog="Example: labkit bench decode --formats fp32,bf16",
    rich_markup_mode=None,
    no_args_is_help=False,
)

Formats = Annotated[str, typer.Option(help="Recipes and number formats, separated by commas; may be empty.")]
Peers = Annotated[str, typer.Option(help="Others to compare with: transformers, llama.cpp, torchao …")]
PromptTokens = Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")]
Kernels = Annotated[str, typer.Option(help="auto, native (labkit's own) or torch (PyTorch's operators).")]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds; every arm runs once a round.")]


@bench.command()
def decode(
    formats: Formats = "fp32,bf16",
    peers: Peers = "",
    model: Model = "default",
    prompt_tokens: PromptTokens = 128,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated after it.")] = 128,
    repeats: Repeats = 3,
    device: Device = "cpu",
    threads: Threads = None,
    kernels: Kernels = "auto",
    explain: Annotated[bool, typer.Option("--explain", help="Also where the time of one step goes.")] = False,
    as_json: Json = False,
) -> None:
    """Time per output token, tok/s and the share of this machine's read bandwidth.

    \b
    Example:  labkit bench decode --formats fp32,bf16 --peers transformers --threads 2
    """
    from labkit.bench import decode as room

    own, others = _arms(formats, peers)
    result = room.run(
        model, own, others, threads, prompt_tokens, new_tokens, repeats, device, on_progress=say, kernels=kernels, explain=explain
    )
    answer(result, as_json, room.render(result))


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
    """Time to the first token of a prompt, and prompt tokens a second.

    \b
    Example:  labkit bench prefill --formats fp32,bf16 --prompt-tokens 512
    """
    from labkit.bench import prefill as room

    own, others = _arms(formats, peers)
    result = room.run(model, own, others, threads, prompt_tokens, repeats, device, on_progress=say, kernels=kernels)
    answer(result, as_json, room.render(result))


@bench.command("kernels")
def kernels_(
    formats: Formats = "fp32,bf16,int8,int4",
    model: Model = "default",
    rows: Annotated[int, typer.Option(min=1, help="Rows (tokens) multiplied at once.")] = 1,
    repeats: Repeats = 7,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """The products of one layer, kernel against kernel, with weights that come from memory.

    \b
    Example:  labkit bench kernels --formats bf16,int4 --rows 5
    """
    from labkit.bench import kernels as room

    result = room.run(model, _arms(formats, "")[0], rows, threads, repeats, device, on_progress=say)
    answer(result, as_json, room.render(result))


@bench.command()
def speculate(
    arms: Annotated[str, typer.Option(help="DRAFTER:TASK, separated by commas; without it the usual ten.")] = "",
    recipe: Annotated[str, typer.Option(help="The target's: fp32, bf16, int8, int4 or a format.")] = "bf16",
    model: Model = "default",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts a task.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=2, help="At most so many new tokens a prompt.")] = 64,
    draft_length: Annotated[str, typer.Option(help="Tokens drafted a pass, or auto; without it 8 looked up, 3 otherwise.")] = "",
    repeats: Repeats = 3,
    device: Device = "cpu",
    threads: Threads = None,
    kernels: Kernels = "auto",
    as_json: Json = False,
) -> None:
    """Drafters on tasks, against plain decoding of the same weights.

    \b
    Example:  labkit bench speculate --arms lookup:edit,int4_g32_zp:chat --recipe bf16
    """
    from labkit.bench import speculate as room

    asked = [name.strip() for name in arms.split(",") if name.strip()] or room.ARMS
    length = parse_length(draft_length) if draft_length else None
    result = room.run(model, asked, recipe, threads, prompts, new_tokens, repeats, length, device, kernels, say)
    answer(result, as_json, room.render(result))


def _arms(formats: str, peers: str) -> tuple[list[str], list[str]]:
    arms = [[name.strip() for name in text.split(",") if name.strip()] for text in (formats, peers)]
    if not any(arms):
        raise BadRequest("--formats and --peers are both empty; name at least one, as in --formats fp32,bf16")
    for option, names in zip(("--formats", "--peers"), arms):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise BadRequest(f"{option} names {twice[0]} twice; name each arm once")
    return arms[0], arms[1]
