"""Where the time of one decode step goes: each part's bytes, the seconds that reading them must take, and those it took.

    weights     the products of all layers          KV        appending to the cache, and attention over it
    head        the product with the vocabulary     norms     norms and activations; native: rounding to INT8 too
    rotary      turning queries and keys            sampling  the most likely of V logits
    embedding   one row                             dispatch  what is left: calling all of these, residuals, Python

Predicted are the bytes over the read-only bandwidth; what works on a few thousand numbers in the first-level cache is
predicted as nothing, so what it takes is overhead by definition. The native stack keeps its own clock (of its first
thread, with the waiting for others); elsewhere a clock is put around the modules, which costs a few microseconds each
and waits for a GPU after each of them: there the parts add up to more than a step takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import contextmanager

import torch

from labkit.bench.harness import table
from labkit.generate.sampling import greedy
from labkit.measure.clock import synchronize
from labkit.model.native_decoder import NativeDecoder
from labkit.plan.shapes import ModelShape
from labkit.plan.time import kv_bytes_read
from labkit.plan.weights import matrix_bytes, planned_recipe

PARTS = ("weights", "KV", "head", "norms", "rotary", "embedding", "sampling", "dispatch")
NATIVE = {"products": "weights", "attention": "KV"}  # names of the native stack's phases; the others are equal
STEPS = 24


def bytes_of(shape: ModelShape, recipe: str, length: int, kv_format: str) -> dict[str, float]:
    """Bytes that each part of a step reads when `length` tokens are seen, the new one among them; and dispatch: none."""
    formats = planned_recipe(recipe)
    size = {matrix.name: matrix_bytes(matrix, formats, shape.tied) for matrix in shape.part("embedding", "head")}
    table_bytes = next(size[m.name] for m in shape.part("embedding"))
    head = next((size[m.name] for m in shape.part("head")), table_bytes)  # tied: the table again
    weights = sum(matrix_bytes(m, formats, shape.tied) for m in shape.part("blocks", "router"))
    kv = sum(kv_bytes_read(shape, layer, length, kv_format) for layer in range(shape.num_layers))
    none = dict.fromkeys(PARTS, 0.0)
    return none | {"weights": weights, "KV": kv, "head": head, "embedding": table_bytes / shape.vocab_size,
                   "sampling": 4.0 * shape.vocab_size}  # fmt: skip


class Stopwatch:
    """Seconds by label; what runs inside of something labelled is counted there and not outside."""

    def __init__(self, device):
        self.device, self.seconds, self.open = device, dict.fromkeys(PARTS, 0.0), []

    def start(self, label: str) -> None:
        synchronize(self.device)
        self.open.append([label, time.perf_counter(), 0.0])

    def stop(self) -> None:
        synchronize(self.device)
        label, began, inside = self.open.pop()
        took = time.perf_counter() - began
        self.seconds[label] += took - inside
        if self.open:
            self.open[-1][2] += took


def _label(name: str) -> str | None:
    """The part that a module of the decoder belongs to, by its name."""
    last = name.rpartition(".")[2]
    if last in ("qkv", "o", "gate_up", "down"):
        return "weights"
    if "norm" in last or last == "mlp":
        return "norms"
    if "rotary" in last or last == "attention":
        return "rotary"
    return {"head": "head", "embed_tokens": "embedding"}.get(last)


@contextmanager
def watched(decoder, cache, watch: Stopwatch):
    """Clocks around the modules of a plain decoder and around the two methods of its cache."""
    hooks = []
    for name, module in decoder.named_modules():
        label = _label(name)
        if label is not None:
            hooks.append(module.register_forward_pre_hook(lambda *_, label=label: watch.start(label)))
            hooks.append(module.register_forward_hook(lambda *_: watch.stop()))
    plain = {name: getattr(cache, name) for name in ("append", "attend")}

    def clocked(method):
        def call(*arguments, **options):
            watch.start("KV")
            result = method(*arguments, **options)
            watch.stop()
            return result

        return call

    for name, method in plain.items():
        setattr(cache, name, clocked(method))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name in plain:
            delattr(cache, name)


@torch.inference_mode()
def budget(decoder, recipe: str, shape: ModelShape, prompt: Sequence[int], bandwidth: float, kv_format: str = "bf16",
           steps: int = STEPS) -> dict[str, dict[str, float]]:  # fmt: skip
    """{part: bytes, predicted_ms, measured_ms} of a decode step behind `prompt`, means over `steps` steps."""
    cache = decoder.new_cache(1, len(prompt) + 2 * steps + 1)
    watch, native = Stopwatch(decoder.device), isinstance(decoder, NativeDecoder)

    def choose(logits):
        watch.start("sampling")
        token = torch.tensor([greedy(logits[:, -1])], device=decoder.device).view(1, 1)
        watch.stop()
        return token

    def run(token):
        for _ in range(steps):
            watch.start("dispatch")
            logits = decoder(token, cache, last_only=True)
            token = choose(logits)
            watch.stop()
        return token

    token = run(choose(decoder(torch.tensor([list(prompt)], device=decoder.device), cache, last_only=True)))  # warm
    watch.seconds = dict.fromkeys(PARTS, 0.0)
    with decoder.spending() if native else watched(decoder, cache, watch) as spent:
        run(token)
    seconds = dict(watch.seconds)
    for phase, took in (spent or {}).items():
        seconds[NATIVE.get(phase, phase)] += took
        seconds["dispatch"] -= took
    counted = bytes_of(shape, recipe, len(prompt) + steps + steps // 2, kv_format)
    return {part: {"bytes": counted[part], "predicted_ms": 1000 * counted[part] / bandwidth,
                   "measured_ms": 1000 * seconds[part] / steps} for part in PARTS}  # fmt: skip


def render(name: str, parts: dict[str, dict[str, float]]) -> str:
    """One arm's budget as a table, with the sum."""
    columns = ("bytes", "predicted_ms", "measured_ms")
    parts = parts | {"together": {column: sum(part[column] for part in parts.values()) for column in columns}}
    rows = [(part, f"{v['bytes'] / 2**20:.2f}", f"{v['predicted_ms']:.3f}", f"{v['measured_ms']:.3f}") for part, v in parts.items()]
    return table((f"one step of {name}", "MiB", "predicted ms", "measured ms"), rows)
