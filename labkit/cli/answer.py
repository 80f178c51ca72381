"""How a command answers: text for people, or with `--json` one strict JSON object as the last line."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.errors import BadRequest

stdout = sys.stdout  # set by `main`, which sends everything else to stderr under --json

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Model = Annotated[str, typer.Option(help="A name, a folder of safetensors, a .gguf file or a hub id.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or mps.")]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads; without it PyTorch's own choice.")]


def answer(result: Mapping[str, Any], as_json: bool, text: str = "") -> None:
    """Print `result` as JSON, or `text`."""
    if as_json:
        print(json.dumps(plain(result), allow_nan=False, ensure_ascii=False), file=stdout, flush=True)
    elif text:
        print(text, flush=True)


def plain(value: Any) -> Any:
    """Only what JSON has: NaN and infinities become null, numbers of libraries become Python's."""
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return plain(value.item())
    return str(value)


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


class Steps:
    """Progress of many small steps: one line that rewrites itself on a terminal, now and then a line elsewhere."""

    def __init__(self, every_s: float = 5.0):
        self.every_s, self.last = every_s, time.monotonic()

    def __call__(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[2K{text}\r", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.last >= self.every_s:
            self.last = time.monotonic()
            say(text)


def parse_length(text: str) -> int | str:
    """A draft length as it is written on the command line."""
    if text == "auto":
        return text
    if not text.isdecimal():
        raise BadRequest(f'--draft-length is {text!r}; give a whole number from 0 up, or "auto"')
    return int(text)


def use_threads(threads: int | None) -> None:
    """Set PyTorch's threads, where a number was asked for."""
    if threads:
        import torch

        torch.set_num_threads(threads)
