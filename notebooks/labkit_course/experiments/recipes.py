"""Compare recipes: step times predicted from bytes, then from operators, then measured.

    bytes       weights and cache that a step reads / read-only bandwidth: the lower bound
    operators   products in the recipe's packed kernels, timed on weights of the model's shapes
    measured    the model's own step, all recipes interleaved

`break_even(a, b)` is the smallest batch at which `a` is no longer faster than `b`, on predicted
or measured curves. When it loses: above 16 rows PyTorch's packed operators unpack the whole
weight on every call, which is cheap for a long prefill and expensive for a batch of 30.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from labkit.errors import BadRequest
from labkit.formats import DTYPES, get_format, get_recipe, round_to_nearest, torch_dtype
from labkit.kernels.packed_weight import FEW_ROWS
from labkit.lab.bench.arms import generate_run, prompt_ids
from labkit.lab.bench.harness import Arm, compare
from labkit.lab.bench.operators import Sizes, linear_of_ones, measure_operators
from labkit.lab.measure.clock import Timing, interleave
from labkit.lab.plan.operator_times import Curve, OperatorTimes, step_parts
from labkit.plan.shapes import ModelShape
from labkit.plan.time import step_cost
from labkit.quant.linear import QuantizedLinear

SIZES = (1, 4, FEW_ROWS, FEW_ROWS + 1, 32, 256, 1024)
KEYS = (16, 256)  # attention is the same in every recipe of one dtype; two lengths are enough here


def kv_format(recipe: str) -> str:
    """Return the dtype of activations and cache of a recipe; bf16 with packed weights."""
    name = get_recipe(recipe).name
    return name if name in DTYPES else "bf16"


def roofline_s(
    shape: ModelShape, recipe: str, bandwidth: float, batch: int = 1, past: int = 64
) -> float:
    """Return the seconds of reading a decode step's bytes."""
    return step_cost(shape, batch, 1, past, recipe, kv_format(recipe)).bytes / bandwidth


def recipe_operators(
    shape: ModelShape,
    recipe: str,
    *,
    device="cpu",
    threads: int | None = None,
    max_rows: int = 16,
    max_batch: int = 16,
    rest: OperatorTimes | None = None,
) -> OperatorTimes:
    """Return the operator curves of a recipe: its own products, all else in `kv_format`'s dtype.

    One row more than the packed operators support is timed too, because the time jumps there.
    `rest` are the curves of another recipe of the same dtype; its attention is reused.
    """
    formats, dtype = get_recipe(recipe), torch_dtype(kv_format(recipe))

    def make(part: str, rows: int, columns: int):
        format = get_format(getattr(formats, part))
        if format.kind == "float":
            return linear_of_ones(rows, columns, dtype, device)
        # One pattern of numbers is as slow as any other; a ramp keeps every group's scale above zero.
        row = torch.linspace(-1, 1, columns, device=device)
        return QuantizedLinear(round_to_nearest(row.expand(rows, columns), format))

    with torch.inference_mode():
        return measure_operators(
            shape,
            dtype,
            device=device,
            threads=threads,
            sizes=Sizes.up_to(max_rows, max_batch, SIZES, KEYS),
            make=make,
            rest=rest,
        )


def all_operators(shape: ModelShape, names: Sequence[str], **options) -> dict[str, OperatorTimes]:
    """Return the curves of several recipes; attention is timed once per dtype."""
    found: dict[str, OperatorTimes] = {}
    for name in names:
        alike = next(
            (times for other, times in found.items() if kv_format(other) == kv_format(name)), None
        )
        found[name] = recipe_operators(shape, name, rest=alike, **options)
    return found


def predicted_steps(
    shape: ModelShape, times: OperatorTimes, batches: Sequence[int], past: int = 64
) -> list[float]:
    """Return seconds of a decode step at each batch."""
    return [sum(step_parts(shape, times, batch, 1, past).values()) for batch in batches]


def predicted_prefill(shape: ModelShape, times: OperatorTimes, tokens: int) -> float:
    return sum(step_parts(shape, times, 1, tokens, 0).values())


@torch.inference_mode()
def batch_steps(
    models: Mapping[str, torch.nn.Module],
    batches: Sequence[int],
    *,
    past: int = 64,
    repeats: int = 3,
    steps: int = 3,
) -> dict[str, list[Timing]]:
    """Return {recipe: [Timing of one decode step at each batch]}, interleaved.

    Each timing is a mean of `steps` steps.
    """
    found: dict[str, list[Timing]] = {name: [] for name in models}
    for batch in batches:
        calls = {name: _decode_call(model, batch, past, steps) for name, model in models.items()}
        timings = interleave(calls, repeats=repeats, device=next(iter(models.values())).device)
        for name, timing in timings.items():
            found[name].append(Timing(tuple(t / steps for t in timing.times_s)))
    return found


def _decode_call(model, batch: int, past: int, steps: int) -> Callable[[], None]:
    text = torch.arange(past, device=model.device).remainder(model.config.vocab_size)
    cache = model.new_cache(batch=1, capacity=past + steps)
    model(text[None], cache, last_only=True)
    cache.select([0] * batch)  # all rows alike: one prefill serves them
    token = torch.ones(batch, 1, dtype=torch.long, device=model.device)

    def call() -> None:
        cache.rewind(past)
        for _ in range(steps):
            model(token, cache, last_only=True)

    return call


@torch.inference_mode()
def prefill_times(
    models: Mapping[str, torch.nn.Module], tokens: int, *, repeats: int = 3
) -> dict[str, Timing]:
    """Return {recipe: Timing of a prefill of `tokens` tokens}, interleaved."""

    def one(model):
        text = torch.arange(tokens, device=model.device).remainder(model.config.vocab_size)[None]
        return lambda: model(text, model.new_cache(capacity=tokens), last_only=True)

    calls = {name: one(model) for name, model in models.items()}
    return interleave(calls, repeats=repeats, device=next(iter(models.values())).device)


def decode_times(
    models: Mapping[str, torch.nn.Module],
    *,
    prompt_tokens: int = 32,
    new_tokens: int = 16,
    repeats: int = 5,
) -> dict[str, Timing]:
    """Return {recipe: Timing per token after the first}, greedy, interleaved."""
    first = next(iter(models.values()))
    arms = [Arm(name, generate_run(model)) for name, model in models.items()]
    runs = compare(arms, prompt_ids(first, prompt_tokens), new_tokens, repeats, first.device)
    return {name: Timing(tuple(run.tpot_s for run in kept)) for name, kept in runs.items()}


def break_even(
    batches: Sequence[int], small: Sequence[float], other: Sequence[float], most: int | None = None
) -> int | None:
    """Return the smallest batch at which a step of `small` takes as long as one of `other`.

    Returns None if there is none up to `most`. Seconds are interpolated between the given batches
    (straight lines in log-log), not extrapolated.
    """
    if not len(batches) == len(small) == len(other) >= 1:
        raise BadRequest(
            "Batches and both lists of seconds have different lengths; give one time per batch."
        )
    a, b = (Curve(tuple(zip(batches, seconds))) for seconds in (small, other))
    reach = range(min(batches), min(most or max(batches), max(batches)) + 1)
    return next((batch for batch in reach if a(batch) * (1 + 1e-9) >= b(batch)), None)
