"""Microbenchmarks of one layer's operators, for `labkit.lab.plan.operator_times`.

The model itself never runs.

    products     matrices of the model's shapes, in the order of a layer; all copies
                 together do not fit into the last-level cache, as in a real step
    attention    a random cache, with several layers for the same reason
    glue         the time that norms, rotation, activation and residuals add

Each size is repeated at least 3 times and for about 0.12 s. A model shape takes about
5 s per dtype on two cores.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from labkit.cache.contiguous import ContiguousCache
from labkit.generate.sampling import greedy
from labkit.lab.measure.bandwidth import using_threads
from labkit.lab.measure.bytes import tensor_bytes
from labkit.lab.measure.clock import time_once
from labkit.lab.measure.machine import last_level_cache_bytes
from labkit.lab.plan.operator_times import Curve, OperatorTimes, fused_products
from labkit.model.rope import rotate
from labkit.plan.kv import KVShape
from labkit.plan.shapes import ModelShape

ROWS = (1, 2, 4, 8, 16, 64, 256, 1024)
KEYS = (16, 256, 1024)
BATCHES = (1, 4, 16)
BUDGET_S = 0.12  # seconds for the repeats of one size

Timed = tuple[Callable[[], object], int]  # a call, and how many layers it runs


@dataclass(frozen=True)
class Sizes:
    """The sizes that are timed: rows of products and of the head, batches, cached keys."""

    rows: Sequence[int]
    head_rows: Sequence[int]
    batches: Sequence[int]
    keys: Sequence[int]

    @classmethod
    def up_to(
        cls,
        rows: int = 1024,
        batch: int = 16,
        all_rows: Sequence[int] | None = None,
        keys: Sequence[int] | None = None,
    ) -> Sizes:
        """Return the usual sizes up to `rows` and `batch`."""
        limits = ((all_rows or ROWS, rows), (all_rows or ROWS, batch), (BATCHES, batch))
        sizes = ([size for size in usual if size <= most] or [1] for usual, most in limits)
        return cls(*sizes, keys or KEYS)


def measure_operators(
    model: ModelShape,
    dtype: torch.dtype = torch.float32,
    *,
    sizes: Sizes | None = None,
    device="cpu",
    threads: int | None = None,
    make: Callable[[str, int, int], nn.Module] | None = None,
    rest: OperatorTimes | None = None,
) -> OperatorTimes:
    """Return the curves of one model shape, in seconds per layer.

    `make(part, rows, columns)` makes a linear layer of "blocks" or "head". By default
    it is a plain one in `dtype`, as all other operators are. `rest`: earlier curves of
    the same shape and dtype, whose attention and step are reused and not measured again.
    """
    sizes = sizes or Sizes.up_to()
    place = {"dtype": dtype, "device": device}
    make = make or (lambda part, rows, columns: linear_of_ones(rows, columns, **place))

    def curve(all_sizes: Sequence[int], timed: Callable[[int], Timed]) -> Curve:
        calls = ((size, *timed(size)) for size in all_sizes)
        return Curve(
            tuple((n, max(seconds(call, device) / layers, 1e-9)) for n, call, layers in calls)
        )

    def attention(batch: int) -> Curve:
        return curve(sizes.keys, lambda keys: _attention(model, batch, 1, keys, place))

    with using_threads(threads), torch.inference_mode():
        layers = _layers(fused_products(model), make)
        head = make("head", model.vocab_size, model.hidden_size)
        products = curve(sizes.rows, lambda rows: _products(layers, rows, place))
        whole = curve(sizes.rows, lambda rows: _whole(model, layers, rows, place))
        own = {
            "products": products,
            "head": curve(sizes.head_rows, lambda rows: _products([[head]], rows, place)),
            "glue": Curve(tuple((r, max(t - products(r), 1e-9)) for r, t in whole.points)),
        }
        if rest is not None:
            return replace(rest, **own)
        return OperatorTimes(
            **own,
            decode_attention={batch: attention(batch) for batch in sizes.batches},
            prefill_attention=curve(sizes.keys, lambda t: _attention(model, 1, t, t, place)),
            step=curve(sizes.rows, lambda rows: _step(model, rows, place)),
        )


def seconds(call: Callable[[], object], device="cpu") -> float:
    """Return the median seconds of at least 3 calls, after one warm-up call."""
    time_once(call, device)
    times: list[float] = []
    while len(times) < 3 or (sum(times) < BUDGET_S and len(times) < 200):
        times.append(time_once(call, device))
    return statistics.median(times)


def cold_copies(layer_bytes: int) -> int:
    """Return how many copies of a layer (1 to 64) are four times the last-level cache.

    Reading them one after another reads each from memory, as a real step does.
    """
    return max(1, min(64, -(-4 * last_level_cache_bytes() // layer_bytes)))


def _layers(shapes, make) -> list[list[nn.Module]]:
    first = [make("blocks", rows, columns) for rows, columns in shapes]
    return [first, *(copy.deepcopy(first) for _ in range(cold_copies(tensor_bytes(first)) - 1))]


def linear_of_ones(rows: int, columns: int, dtype, device) -> nn.Linear:
    """Make a linear layer of ones; the time of a product does not depend on its numbers."""
    linear = nn.utils.skip_init(nn.Linear, columns, rows, bias=False, device=device, dtype=dtype)
    linear.weight.fill_(1.0)
    # PyTorch takes a different path for weights that require gradients.
    return linear.requires_grad_(False)


def _few(layers: list, rows: int) -> list:
    """Return fewer copies for many rows, because they reuse each weight."""
    return layers if rows <= 64 else layers[:3]


def _products(layers, rows: int, place: dict) -> Timed:
    """Time the products alone, on inputs [rows, 1, E]."""
    widths = {linear.in_features for linear in layers[0]}
    inputs = {width: torch.randn(rows, 1, width, **place) for width in widths}
    layers = _few(layers, rows)

    def call() -> None:
        for layer in layers:
            for linear in layer:
                linear(inputs[linear.in_features])

    return call, len(layers)


class _Layer(nn.Module):
    """One layer without attention: norms, products, rotation, activation, residuals.

    It is a module like the decoder's own. Calling modules takes Python time, which
    matters for a small model. The small operators run between the products, so their
    data is as cold as in a real step. If they were timed alone in a loop, they would
    look a third faster.
    """

    def __init__(self, model: ModelShape, linears: list[nn.Module], place: dict):
        super().__init__()
        self.qkv, self.o, self.gate_up, self.down = linears
        self.first = nn.RMSNorm(model.hidden_size, **place)
        self.second = nn.RMSNorm(model.hidden_size, **place)
        self.rotated = model.num_heads + model.kv.layers[0].num_kv_heads
        self.head_dim = model.kv.layers[0].head_dim

    def forward(self, x, cos, attended):
        heads = self.qkv(self.first(x)).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
        rotate(heads[:, : self.rotated], cos, cos)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.second(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _whole(model: ModelShape, layers, rows: int, place: dict) -> Timed:
    """Time layers without attention: a decode step up to 16 rows, else a prefill."""
    modules = [_Layer(model, linears, place) for linears in _few(layers, rows)]
    batch, tokens = (rows, 1) if rows <= 16 else (1, rows)
    head_dim = model.kv.layers[0].head_dim
    x = torch.randn(batch, tokens, model.hidden_size, **place)
    cos = torch.randn(batch, 1, tokens, head_dim, **place)
    attended = torch.randn(batch, model.num_heads, tokens, head_dim, **place)

    def call() -> None:
        for module in modules:
            module(x, cos, attended)

    return call, len(modules)


def _attention(model: ModelShape, batch: int, tokens: int, keys: int, place: dict) -> Timed:
    """Time appending `tokens` and attending to `keys` in a cache of several layers."""
    kv = model.kv.layers[0]
    per_layer = max(1, 2 * batch * keys * kv.num_kv_heads * kv.head_dim * place["dtype"].itemsize)
    layers = min(model.num_layers, cold_copies(per_layer), max(1, 2**28 // per_layer))
    shape = KVShape.uniform(layers, kv.num_kv_heads, kv.head_dim)
    cache = ContiguousCache(shape, batch=batch, capacity=keys, **place)
    queries = torch.randn(batch, model.num_heads, tokens, kv.head_dim, **place)
    new = torch.randn(batch, kv.num_kv_heads, tokens, kv.head_dim, **place)
    if keys > tokens:
        cache.advance(keys - tokens)

    def call() -> None:
        cache.rewind(keys - tokens)
        cache.advance(tokens)
        for layer in range(layers):
            cache.append(layer, new, new)
            cache.attend(layer, queries)

    return call, layers


def _step(model: ModelShape, rows: int, place: dict) -> Timed:
    """Time what happens once per step: embedding, positions, last norm, sampling."""
    norm = nn.RMSNorm(model.hidden_size, **place)
    embedding = nn.Embedding(4096, model.hidden_size, **place)
    angles = torch.randn(4096, model.kv.layers[0].head_dim, **place)
    logits = torch.randn(min(rows, 16), model.vocab_size, **place)

    def call() -> None:
        positions = torch.arange(rows, device=place["device"]).remainder(4096)
        angles[positions], angles[positions]
        norm(embedding(positions))
        torch.tensor(greedy(logits), device=place["device"])

    return call, 1
