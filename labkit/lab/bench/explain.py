"""The budget of one decode step: bytes, predicted and measured time of each part.

    weights     the products of all layers
    KV          appending to the cache, and attention
    head        the product with the vocabulary
    norms       norms and activations; in the native stack also rounding to INT8
    rotary      rotating queries and keys
    embedding   one row
    sampling    the most likely of V logits
    dispatch    the rest: Python, calls, residuals

Predicted time is bytes over read-only bandwidth. Parts that work on a few thousand
numbers in the first-level cache have no predicted time; all of their time is overhead.
The native stack times its own parts on its first thread, including the wait for the
other threads. Other decoders get a clock around each module. The clock costs a few
microseconds per module and synchronizes a GPU. So the sum of the parts is larger than
the time of a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from labkit.generate.sampling import greedy
from labkit.kernels.device import synchronize
from labkit.lab.tables import columns_of
from labkit.model.native.decoder import NativeDecoder
from labkit.plan.shapes import ModelShape
from labkit.plan.time import kv_bytes_read
from labkit.plan.weights import matrix_bytes, planned_recipe

PARTS = ("weights", "KV", "head", "norms", "rotary", "embedding", "sampling", "dispatch")
# The native stack's phases whose names differ from ours.
NATIVE = {"products": "weights", "attention": "KV"}
MODULES = dict.fromkeys(("qkv", "o", "gate_up", "down"), "weights")
MODULES |= {"mlp": "norms", "rotary": "rotary", "attention": "rotary"}
MODULES |= {"head": "head", "embed_tokens": "embedding"}
STEPS = 24
COLUMNS = {
    "MiB": "{mib:.2f}",
    "predicted ms": "{predicted_ms:.3f}",
    "measured ms": "{measured_ms:.3f}",
}


def bytes_of(shape: ModelShape, recipe: str, length: int, kv_format: str) -> dict[str, float]:
    """Return the bytes that each part of a step reads with `length` visible tokens."""
    formats = planned_recipe(recipe)

    def size(*parts: str) -> float:
        return sum(matrix_bytes(m, formats, shape.tied) for m in shape.part(*parts))

    embedding = size("embedding")
    return dict.fromkeys(PARTS, 0.0) | {
        "weights": size("blocks", "router"),
        "KV": sum(kv_bytes_read(layer, length, kv_format) for layer in shape.kv.layers),
        "head": size("head") or embedding,  # tied: the same table
        "embedding": embedding / shape.vocab_size,
        "sampling": 4.0 * shape.vocab_size,
    }


class Stopwatch:
    """Add up seconds per part; the time of a nested part counts only there."""

    def __init__(self, device):
        self.device, self.open = device, []
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.start(name)
        yield
        self.stop()

    def start(self, name: str) -> None:
        synchronize(self.device)
        self.open.append([name, time.perf_counter(), 0.0])

    def stop(self) -> None:
        synchronize(self.device)
        name, began, inside = self.open.pop()
        seconds = time.perf_counter() - began
        self.seconds[name] += seconds - inside
        if self.open:
            self.open[-1][2] += seconds


@contextmanager
def watched(decoder, cache, watch: Stopwatch) -> Iterator[None]:
    """Put clocks around the modules of a plain decoder and its cache's methods."""
    hooks = []
    for name, module in decoder.named_modules():
        last = name.rpartition(".")[2]
        part = "norms" if "norm" in last else MODULES.get(last)
        if part is not None:
            before = lambda *_, part=part: watch.start(part)  # noqa: E731
            hooks.append(module.register_forward_pre_hook(before))
            hooks.append(module.register_forward_hook(lambda *_: watch.stop()))

    def clocked(method):
        def call(*arguments, **options):
            with watch.part("KV"):
                return method(*arguments, **options)

        return call

    cache.append, cache.attend = clocked(cache.append), clocked(cache.attend)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        del cache.append, cache.attend


@torch.inference_mode()
def budget(
    decoder,
    recipe: str,
    shape: ModelShape,
    prompt: Sequence[int],
    bandwidth: float,
    kv_format: str = "bf16",
    steps: int = STEPS,
) -> dict[str, dict[str, float]]:
    """Return {part: bytes, predicted_ms, measured_ms} of a decode step after `prompt`.

    Times are means over `steps` steps; `bandwidth` is in bytes per second.
    """
    cache = decoder.new_cache(1, len(prompt) + 2 * steps + 1)
    watch = Stopwatch(decoder.device)

    def choose(logits):
        with watch.part("sampling"):
            return torch.tensor([greedy(logits[:, -1])], device=decoder.device).view(1, 1)

    def run(token):
        for _ in range(steps):
            with watch.part("dispatch"):
                token = choose(decoder(token, cache, last_only=True))
        return token

    ids = torch.tensor([list(prompt)], device=decoder.device)
    token = run(choose(decoder(ids, cache, last_only=True)))  # warm-up
    watch.seconds = dict.fromkeys(PARTS, 0.0)
    native = isinstance(decoder, NativeDecoder)
    with decoder.spending() if native else watched(decoder, cache, watch) as phases:
        run(token)
    seconds = watch.seconds
    for phase, spent in (phases or {}).items():
        seconds[NATIVE.get(phase, phase)] += spent
        seconds["dispatch"] -= spent
    nbytes = bytes_of(shape, recipe, len(prompt) + steps + steps // 2, kv_format)
    return {
        part: {
            "bytes": nbytes[part],
            "predicted_ms": 1000 * nbytes[part] / bandwidth,
            "measured_ms": 1000 * seconds[part] / steps,
        }
        for part in PARTS
    }


def render(name: str, parts: dict[str, dict[str, float]]) -> str:
    """Return one arm's budget as a table, with the sum."""
    keys = ("bytes", "predicted_ms", "measured_ms")
    total = {key: sum(part[key] for part in parts.values()) for key in keys}
    entries = parts | {"together": total}
    rows = {part: entry | {"mib": entry["bytes"] / 2**20} for part, entry in entries.items()}
    return columns_of(rows, COLUMNS, f"one step of {name}")
