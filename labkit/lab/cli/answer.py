"""Options, progress and output (text or JSON), shared by the commands."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

from typer import Option

from labkit.errors import BadRequest

stdout = sys.stdout  # set by `main`; with --json, all other output goes to stderr

Json = Annotated[bool, Option("--json", help="Print one JSON object as the last line.")]
Model = Annotated[str, Option(help="A name, a folder of safetensors, a .gguf file or a hub id.")]
Device = Annotated[str, Option(help="cpu, cuda or mps.")]
Recipe = Annotated[str | None, Option(help="fp32, bf16, int8, int4 or a number format.")]
Threads = Annotated[int | None, Option(min=1, max=1024, help="CPU threads. Default: PyTorch's.")]
Method = Annotated[str | None, Option(help="rtn, gptq, awq, clip, or a sum such as awq+gptq.")]


def answer(result: Mapping[str, Any], as_json: bool, text: str = "") -> None:
    """Print `result` as one JSON object, or `text`."""
    if as_json:
        line = json.dumps(plain(result), allow_nan=False, ensure_ascii=False)
        print(line, file=stdout, flush=True)
    elif text:
        print(text, flush=True)


def plain(value: Any) -> Any:
    """Convert a value to JSON's types; NaN and infinities become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry) for entry in value]
    if hasattr(value, "item"):  # a tensor or an array of one number
        return plain(value.item())
    return value if value is None or isinstance(value, str | int) else str(value)


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


class Steps:
    """Print the progress of many small steps on one line of a terminal.

    If stderr is not a terminal, print a line at most every `every_s` seconds.
    """

    def __init__(self, every_s: float = 5.0):
        self.every_s, self.last = every_s, time.monotonic()

    def __call__(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[2K{text}\r", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.last >= self.every_s:
            self.last = time.monotonic()
            say(text)


def parse_length(text: str) -> int | str:
    """Parse a draft length: a whole number or "auto"."""
    if text == "auto":
        return text
    if not text.isdecimal():
        raise BadRequest(f'--draft-length is {text!r}; give a whole number or "auto"')
    return int(text)


def parse_dtype(name: str | None) -> str | None:
    """Parse fp32, bf16 or fp16; PyTorch's names (float32 …) are accepted too."""
    aliases = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    name = aliases.get(name, name)
    if name is not None and name not in aliases.values():
        raise BadRequest(f"--dtype is {name!r}; choose one of {', '.join(aliases.values())}")
    return name


def use_threads(threads: int | None) -> None:
    """Set PyTorch's number of threads, if one is given."""
    if threads:
        import torch

        torch.set_num_threads(threads)
