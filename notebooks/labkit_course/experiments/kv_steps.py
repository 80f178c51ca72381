"""Predict a decode step over KV caches of several formats from one layer's attention; measure it.

    predicted(format, S) = [step(bf16, short) - L * layer(bf16, short)] + L * layer(format, S)

A layer's time is that of `append` and `attend` for one token on random keys; the step at a
short context gives the time of everything else. So a long step is predicted without running the
model at that length. Limitation: formats with a tail pack once per block of tokens, which a
timing of single, rewound steps does not include; formats without a tail pack in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from labkit.cache import ContiguousCache, KVCache, quantized_cache
from labkit.errors import BadRequest, whole_number
from labkit.formats import DTYPES, torch_dtype
from labkit.lab.measure.clock import Timing, interleave
from labkit.plan.kv import KVShape
from labkit.plan.kv_formats import KVFormat, get_kv_format


def made_up(
    kv_format: str | KVFormat,
    shape: KVShape,
    tokens: int,
    more: int = 8,
    dtype=torch.bfloat16,
    device="cpu",
) -> KVCache:
    """Return a cache of `tokens` random tokens, with room for `more`."""
    found, tokens = get_kv_format(kv_format), whole_number(tokens, "tokens", 1)
    if not found.packed and found.name not in DTYPES:
        raise BadRequest(
            f"KV format {found.name} is for plans only; choose a format that a cache can store."
        )
    maker: Callable = quantized_cache(found) if found.packed else ContiguousCache
    cache = maker(
        shape,
        batch=1,
        capacity=tokens + more,
        dtype=dtype if found.packed else torch_dtype(found.name),
        device=device,
    )
    source = torch.Generator().manual_seed(0)
    cache.advance(tokens)
    for i, layer in enumerate(shape.layers):
        size = (1, layer.num_kv_heads, tokens, layer.head_dim)
        keys, values = (
            torch.randn(size, generator=source).to(cache.dtype).to(device) for _ in range(2)
        )
        cache.append(i, keys, values)
    return cache


def _back(cache: KVCache, tokens: int, one: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        cache.rewind(tokens)
        one()

    return call


@torch.inference_mode()
def layer_times(
    shape: KVShape,
    heads: int,
    formats: Sequence[str],
    tokens: int,
    *,
    repeats: int = 20,
    dtype=torch.bfloat16,
    device="cpu",
) -> dict[str, Timing]:
    """Return {format: seconds of one layer's append and attend for one more token}, interleaved."""
    one_layer = KVShape(shape.layers[:1])
    layer = shape.layers[0]
    if not formats or whole_number(heads, "heads", 1) % layer.num_kv_heads:
        raise BadRequest(
            f"{heads} query heads share {layer.num_kv_heads} KV heads, in {len(formats)} formats; give a multiple of "
            "the KV heads, and at least one format."
        )
    calls = {}
    for name in formats:
        cache = made_up(name, one_layer, tokens, dtype=dtype, device=device)
        q = torch.randn(1, heads, 1, layer.head_dim, dtype=cache.dtype, device=device)
        k = torch.randn(1, layer.num_kv_heads, 1, layer.head_dim, dtype=cache.dtype, device=device)

        def one(cache=cache, q=q, k=k) -> None:
            cache.advance(1)
            cache.append(0, k, k)
            cache.attend(0, q)

        calls[name] = _back(cache, tokens, one)
    return interleave(calls, repeats=repeats, warmup=3, device=device)


@torch.inference_mode()
def step_times(
    model, formats: Sequence[str], tokens: int, *, repeats: int = 7
) -> dict[str, Timing]:
    """Return {format: seconds of a decode step of `model` after `tokens` tokens}, interleaved."""
    token = torch.ones(1, 1, dtype=torch.long, device=model.device)
    calls = {}
    for name in formats:
        cache = made_up(name, model.config.kv_shape, tokens, dtype=model.dtype, device=model.device)
        calls[name] = _back(cache, tokens, lambda cache=cache: model(token, cache, last_only=True))
    return interleave(calls, repeats=repeats, warmup=2, device=model.device)


def predicted(rest: float, layers: int, one_layer: Timing) -> float:
    """Return seconds of a step: `one_layer` of attention per layer, and `rest` for all else."""
    return rest + layers * one_layer.median_s


def rest_of_step(short_step: Timing, layers: int, one_layer: Timing) -> float:
    """Return the seconds of a step that are not attention, from one at a short context."""
    return max(short_step.median_s - layers * one_layer.median_s, 0.0)
