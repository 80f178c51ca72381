"""Compare pages with a padded cache: memory over lengths of conversations, and step times.

    waste(pages of size P)  =  1 - sum(lengths) / sum(ceil(length / P) * P)
    predicted(kind, lengths) = [step(padded, equal) - L * layer(padded, equal)] + L * layer(kind, lengths)

The expected waste is half a block per row. One measured step and the time of one layer's
attention, on random numbers, predict every other arm. When it loses: tables gain nothing if all
rows have equal length. Limitation: below about 6 repeats the interval is the whole range.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import torch

from labkit.cache import ContiguousCache, KVCache, PagedCache, paged_cache
from labkit.cache.contract import doubled
from labkit.errors import BadRequest
from labkit.lab.measure.clock import Timing, interleave
from labkit.plan.kv import KVShape

KINDS: dict[str, Callable[..., KVCache]] = {
    "padded": ContiguousCache,
    "pages": PagedCache,
    "int8 pages": paged_cache(kv_format="int8"),
}
DECODE_LENGTHS = {
    "equal": (512,) * 8,
    "unequal": (64, 95, 141, 210, 312, 464, 689, 1024),
}  # steps of a factor


def conversation_lengths(
    count: int, seed: int = 0, median: int = 350, spread: float = 0.9, most: int = 2048
) -> list[int]:
    """Return the tokens of `count` conversations: log-normal, many short ones and a long tail."""
    if count < 1:
        raise BadRequest(f"count is {count}; give at least 1 conversation.")
    source = random.Random(seed)
    return [
        min(max(round(source.lognormvariate(0, spread) * median), 8), most) for _ in range(count)
    ]


def slots_allocated(lengths: Sequence[int], context: int, size: int = 16) -> dict[str, int]:
    """Return {way: slots allocated for these rows}.

    "doubling" is one contiguous cache per row that doubles as it fills.
    """
    grown = []
    for length in lengths:
        slots = doubled(KVCache.first_slots, length)
        grown.append(min(slots, context))
    return {
        "reserved for the context": context * len(lengths),
        "padded to the longest": max(lengths) * len(lengths),
        "a row each, doubling": sum(grown),
        f"pages of {size}": sum(-(-length // size) * size for length in lengths),
    }


def expected_waste(mean_length: float, size: int) -> float:
    """Return the expected waste if the last block holds any number of tokens equally often."""
    return (size - 1) / 2 / (mean_length + (size - 1) / 2)


def measured_waste(lengths: Sequence[int], size: int) -> float:
    """Return the waste of a real cache with these lengths (one small layer: tables are shared)."""
    cache = PagedCache(KVShape.uniform(1, 1, 2), len(lengths), block=size)
    cache.advance(max(lengths), list(lengths))
    return cache.waste


def rows_that_fit(lengths: Sequence[int], slots: int, row: Callable[[int], int]) -> int:
    """Return how many of these rows, in order, fit into `slots`; row(n) slots for n tokens."""
    held = count = 0
    for length in lengths:
        held += row(length)
        if held > slots:
            break
        count += 1
    return count


def filled(
    kind: str,
    shape: KVShape,
    lengths: Sequence[int],
    dtype: torch.dtype,
    device="cpu",
    room: int = 8,
) -> KVCache:
    """Return a cache of rows of these lengths with random numbers, and room for a few steps."""
    cache = KINDS[kind](
        shape, batch=len(lengths), capacity=max(lengths) + room, dtype=dtype, device=device
    )
    source = torch.Generator().manual_seed(0)
    cache.advance(max(lengths), list(lengths))
    for i, layer in enumerate(shape.layers):
        size = (len(lengths), layer.num_kv_heads, max(lengths), layer.head_dim)
        cache.append(i, *(torch.randn(size, generator=source).to(device, dtype) for _ in "kv"))
    return cache


@torch.inference_mode()
def layer_times(
    model, kinds: Sequence[str], lengths: Mapping[str, Sequence[int]], *, repeats: int = 20
):
    """Return {(kind, lengths): Timing} of one layer's append and attend, interleaved."""
    config, calls = model.config, {}
    shape = KVShape(config.kv_shape.layers[:1])
    for kind in kinds:
        for name, rows in lengths.items():
            cache = filled(kind, shape, rows, model.dtype, model.device)
            q = torch.randn(
                len(rows),
                config.num_heads,
                1,
                config.head_dim,
                dtype=model.dtype,
                device=model.device,
            )
            k = torch.randn(
                len(rows),
                config.num_kv_heads,
                1,
                config.head_dim,
                dtype=model.dtype,
                device=model.device,
            )

            def one(cache=cache, rows=rows, q=q, k=k) -> None:
                cache.rewind(rows)
                cache.advance(1)
                cache.append(0, k, k)
                cache.attend(0, q)

            calls[kind, name] = one
    return interleave(calls, repeats=repeats, warmup=3, device=model.device)


@torch.inference_mode()
def step_times(
    model, kinds: Sequence[str], lengths: Sequence[int], *, repeats: int = 7
) -> dict[str, Timing]:
    """Return {kind: Timing of one decode step after rows of these lengths}, interleaved."""
    token, calls = torch.ones(len(lengths), 1, dtype=torch.long, device=model.device), {}
    for kind in kinds:
        cache = filled(kind, model.config.kv_shape, lengths, model.dtype, model.device)

        def one(cache=cache) -> None:
            cache.rewind(lengths)
            model(token, cache, last_only=True)

        calls[kind] = one
    return interleave(calls, repeats=repeats, warmup=1, device=model.device)
