"""Microbenchmarks of the operators of one layer: the constants that `labkit.plan.predict` adds up.

No run of the model enters. Products: random matrices of the model's shapes, in the order of a layer, over so many
copies that none is still in the last-level cache when its turn comes again, as in a real step. Attention: a
random cache of as many layers as that takes. Glue: what norms, rotation, activation and residuals add around them.
Takes about 5 s a dtype on two cores; each size is repeated until it is worth a median, and the median counts.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from labkit.cache.contiguous import ContiguousCache
from labkit.generate.sampling import greedy
from labkit.measure.bandwidth import using_threads
from labkit.measure.bytes import tensor_bytes
from labkit.measure.clock import time_once
from labkit.measure.machine import last_level_cache_bytes
from labkit.model.rope import rotate
from labkit.plan.kv import KVShape
from labkit.plan.predict import Curve, OperatorTimes, fused_products
from labkit.plan.shapes import ModelShape

ROWS = (1, 2, 4, 8, 16, 64, 256, 1024)
KEYS = (16, 256, 1024)
BATCHES = (1, 4, 16)
BUDGET_S = 0.12  # seconds for the repeats of one size


def measure_operators(
    model: ModelShape,
    dtype: torch.dtype = torch.float32,
    *,
    device="cpu",
    threads: int | None = None,
    max_rows: int = 1024,
    max_batch: int = 16,
    sizes: Sequence[int] = ROWS,
    keys: Sequence[int] = KEYS,
    make: Callable[[str, int, int], nn.Module] | None = None,
    rest: OperatorTimes | None = None,
) -> OperatorTimes:
    """The curves of one model shape. `max_rows`, `max_batch`: what the predictions will ask for at most; `sizes`: the rows
    that are timed up to there; `keys`: the lengths at which attention is.

    `make(part, rows, columns)` gives a linear layer of "blocks" or "head" (`labkit.bench.recipes`); None: a plain one in
    `dtype`, which is always the dtype of what surrounds the products. `rest`: curves of the same
    shape and dtype with other products, whose attention and step are taken over."""
    make = make or (lambda part, rows, columns: linear_of_ones(rows, columns, dtype, device))
    shapes = fused_products(model)
    rows = [r for r in sizes if r <= max(max_rows, 1)] or [1]
    batches = [b for b in BATCHES if b <= max_batch] or [1]
    with using_threads(threads), torch.inference_mode():
        layers = _layers(shapes, make)
        head = make("head", model.vocab_size, model.hidden_size)
        products = _curve(rows, lambda r: _products(layers, r, dtype, device), len(layers), device)
        whole = _curve(rows, lambda r: _whole(model, layers, r, dtype, device), len(layers), device)
        return OperatorTimes(
            products=products,
            head=_curve(
                [b for b in sizes if b <= max_batch] or [1],
                lambda b: _call(head, torch.randn(b, 1, model.hidden_size, device=device, dtype=dtype)),
                1,
                device,
            ),
            glue=Curve(tuple((r, max(t - products(r), 1e-9)) for r, t in whole.points)),
            decode_attention=rest.decode_attention if rest else {
                b: _curve(keys, lambda s, b=b: _attention(model, b, 1, s, dtype, device), None, device) for b in batches
            },
            prefill_attention=rest.prefill_attention if rest else _curve(
                keys, lambda t: _attention(model, 1, t, t, dtype, device), None, device
            ),
            step=rest.step if rest else _curve(rows, lambda r: _step(model, r, dtype, device), 1, device),
        )


def seconds(call: Callable[[], object], device="cpu") -> float:
    """Median seconds of one call, from at least 3 calls after one that does not count."""
    time_once(call, device)
    times, spent = [], 0.0
    while len(times) < 3 or (spent < BUDGET_S and len(times) < 200):
        times.append(time_once(call, device))
        spent += times[-1]
    return statistics.median(times)


def _curve(sizes, make, per_call: int | None, device) -> Curve:
    """`make(size)` gives a call, or (call, how many layers it ran); seconds are those of one layer."""
    points = []
    for size in sizes:
        made = make(size)
        call, layers = made if isinstance(made, tuple) else (made, per_call)
        points.append((size, max(seconds(call, device) / layers, 1e-9)))
    return Curve(tuple(points))


def _call(module, x):
    return lambda: module(x)


def cold_copies(layer_bytes: int) -> int:
    """Copies that together are four times the last-level cache, at least one and at most 64."""
    return max(1, min(64, -(-4 * last_level_cache_bytes() // layer_bytes)))


def _layers(shapes, make) -> list[list[nn.Module]]:
    first = [make("blocks", rows, columns) for rows, columns in shapes]
    return [first, *(copy.deepcopy(first) for _ in range(cold_copies(tensor_bytes(first)) - 1))]


def linear_of_ones(rows: int, columns: int, dtype, device) -> nn.Linear:
    """A linear layer of ones: its time does not depend on the numbers, and drawing random ones takes seconds."""
    linear = nn.Linear(columns, rows, bias=False, device="meta", dtype=dtype).to_empty(device=device)
    linear.weight.fill_(1.0)
    return linear.requires_grad_(False)  # as a loaded model's: PyTorch takes other paths for weights that learn


def _products(layers, rows: int, dtype, device):
    """Decode sees [rows, 1, E], prefill [1, rows, E]; the library treats both as a matrix of `rows` rows."""
    layers = layers if rows <= 64 else layers[:3]  # many rows use each weight often: no need to be cold
    inputs = {
        linear.in_features: torch.randn(rows, 1, linear.in_features, device=device, dtype=dtype) for linear in layers[0]
    }

    def call():
        for layer in layers:
            for linear in layer:
                linear(inputs[linear.in_features])

    return call, len(layers)


class _Rest(nn.Module):
    """What surrounds the products of one layer, in its order: norms, rotation, activation, residuals; no attention.

    A module like the decoder's own, as calling modules costs Python time that a small model notices. With the products
    between them the operators run as cold as in a real step; timed alone in a loop they would look a third faster.
    """

    def __init__(self, model: ModelShape, linears: list[nn.Linear], dtype, device):
        super().__init__()
        self.qkv, self.o, self.gate_up, self.down = linears
        self.first, self.second = (nn.RMSNorm(model.hidden_size, device=device, dtype=dtype) for _ in range(2))
        self.heads, self.kv_heads, self.head_dim = (
            model.num_heads, model.kv.layers[0].num_kv_heads, model.kv.layers[0].head_dim,
        )  # fmt: skip

    def forward(self, x, cos, attended):
        B, T, _ = x.shape
        H, K = self.heads, self.kv_heads
        heads = self.qkv(self.first(x)).view(B, T, H + 2 * K, self.head_dim).transpose(1, 2)
        rotate(heads[:, : H + K], cos, cos)
        x = x + self.o(attended.transpose(1, 2).reshape(B, T, H * self.head_dim))
        gate, up = self.gate_up(self.second(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _whole(model: ModelShape, layers, rows: int, dtype, device):
    """Products and what surrounds them, on a decode step of `rows` rows or (above 16) a prefill of `rows` tokens."""
    layers = [_Rest(model, linears, dtype, device) for linears in (layers if rows <= 64 else layers[:3])]
    batch, tokens = (rows, 1) if rows <= 16 else (1, rows)
    x = torch.randn(batch, tokens, model.hidden_size, device=device, dtype=dtype)
    cos = torch.randn(batch, 1, tokens, model.kv.layers[0].head_dim, device=device, dtype=dtype)

    attended = torch.randn(batch, model.num_heads, tokens, model.kv.layers[0].head_dim, device=device, dtype=dtype)

    def call():
        for layer in layers:
            layer(x, cos, attended)

    return call, len(layers)


def _attention(model: ModelShape, batch: int, tokens: int, keys: int, dtype, device):
    """Append `tokens` and attend to `keys` in each row of a cache of several layers, as a step does."""
    kv = model.kv.layers[0]
    per_layer = max(1, 2 * batch * keys * kv.num_kv_heads * kv.head_dim * dtype.itemsize)
    layers = min(model.num_layers, cold_copies(per_layer), max(1, 2**28 // per_layer))
    cache = ContiguousCache(
        KVShape.uniform(layers, kv.num_kv_heads, kv.head_dim), batch=batch, capacity=keys, dtype=dtype, device=device
    )
    queries = torch.randn(batch, model.num_heads, tokens, kv.head_dim, device=device, dtype=dtype)
    new = torch.randn(batch, kv.num_kv_heads, tokens, kv.head_dim, device=device, dtype=dtype)
    if keys > tokens:
        cache.advance(keys - tokens)

    def call():
        cache.rewind(keys - tokens)
        cache.advance(tokens)
        for layer in range(layers):
            cache.append(layer, new, new)
            cache.attend(layer, queries)

    return call, layers


def _step(model: ModelShape, rows: int, dtype, device):
    """What happens once a step: looking tokens up, positions, the last norm, choosing the most likely token."""
    norm = nn.RMSNorm(model.hidden_size, device=device, dtype=dtype)
    table = nn.Embedding(4096, model.hidden_size, device=device, dtype=dtype)
    angles = torch.randn(4096, model.kv.layers[0].head_dim, device=device, dtype=dtype)
    tokens = torch.arange(rows, device=device).remainder(4096)
    logits = torch.randn(min(rows, 16), model.vocab_size, device=device, dtype=dtype)

    def call():
        positions = torch.arange(rows, device=device).remainder(4096)
        angles[positions], angles[positions]
        norm(table(tokens))
        torch.tensor(greedy(logits), device=device)

    return call
