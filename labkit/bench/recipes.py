"""Recipes side by side: how long a step takes in each, predicted from bytes, then from operators, then measured.

    bytes       weights and cache that a step reads / read-only bandwidth: what no step can beat
    operators   the products in the recipe's own packed kernels, timed one by one on made-up weights of the model's shapes
    measured    the model's own step, all recipes in turns

`break_even(a, b)` is the smallest batch at which `a` is no longer faster than `b`. It is asked of the predicted curves
before anything is run, and of the measured ones afterwards.
When it loses: above 16 rows PyTorch's packed operators give way to unpacking the whole weight on every call, which is
cheap for a prefill of hundreds of tokens and dear for a batch of thirty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from labkit.bench.arms import DTYPES, prompt_ids
from labkit.bench.harness import Arm, Run, compare
from labkit.bench.operators import linear_of_ones, measure_operators
from labkit.errors import BadRequest
from labkit.formats import get_format, get_recipe, quantize
from labkit.generate import generate
from labkit.kernels.weight import FEW_ROWS
from labkit.measure.clock import Timing, interleave
from labkit.plan.predict import Curve, OperatorTimes, step_parts
from labkit.plan.shapes import ModelShape
from labkit.plan.time import step_cost
from labkit.quant.linear import QuantizedLinear

SIZES = (1, 4, FEW_ROWS, FEW_ROWS + 1, 32, 256, 1024)
KEYS = (16, 256)  # attention is the same in every recipe of one dtype; two lengths are enough here

def kv_format(recipe: str) -> str:
    """The dtype of activations and cache beside the weights of a recipe: its own, or bf16 beside packed weights."""
    name = get_recipe(recipe).name
    return name if name in DTYPES else "bf16"


def roofline_s(shape: ModelShape, recipe: str, bandwidth: float, batch: int = 1, past: int = 64) -> float:
    """Seconds that reading a decode step's bytes takes."""
    return step_cost(shape, batch, 1, past, recipe, kv_format(recipe)).bytes / bandwidth


def recipe_operators(
    shape: ModelShape, recipe: str, *, device="cpu", threads: int | None = None, max_rows: int = 16, max_batch: int = 16,
    rest: OperatorTimes | None = None,
) -> OperatorTimes:
    """The operator curves of a recipe: products as its layers make them, everything else in `kv_format`'s dtype.

    One more row than the packed operators take is timed as well: between the two there is a jump, not a slope.
    `rest`: the curves of another recipe of the same dtype, whose attention is this one's too."""
    formats, dtype = get_recipe(recipe), DTYPES[kv_format(recipe)]

    def make(part: str, rows: int, columns: int):
        format = get_format(getattr(formats, part))
        if format.kind == "float":
            return linear_of_ones(rows, columns, dtype, device)
        # One pattern of numbers is as slow as any other; a ramp keeps every group's scale above zero.
        row = torch.linspace(-1, 1, columns, device=device)
        return QuantizedLinear(quantize(row.expand(rows, columns), format))

    with torch.inference_mode():
        return measure_operators(
            shape, dtype, device=device, threads=threads, max_rows=max_rows, max_batch=max_batch,
            sizes=SIZES, keys=KEYS, make=make, rest=rest,
        )  # fmt: skip


def all_operators(shape: ModelShape, names: Sequence[str], **options) -> dict[str, OperatorTimes]:
    """The curves of several recipes; attention is timed once a dtype."""
    found: dict[str, OperatorTimes] = {}
    for name in names:
        alike = next((times for other, times in found.items() if kv_format(other) == kv_format(name)), None)
        found[name] = recipe_operators(shape, name, rest=alike, **options)
    return found


def predicted_steps(shape: ModelShape, times: OperatorTimes, batches: Sequence[int], past: int = 64) -> list[float]:
    """Seconds of a decode step at each batch."""
    return [sum(step_parts(shape, times, batch, 1, past).values()) for batch in batches]


def predicted_prefill(shape: ModelShape, times: OperatorTimes, tokens: int) -> float:
    return sum(step_parts(shape, times, 1, tokens, 0).values())


@torch.inference_mode()
def batch_steps(
    models: Mapping[str, torch.nn.Module], batches: Sequence[int], *, past: int = 64, repeats: int = 3, steps: int = 3
) -> dict[str, list[Timing]]:
    """{recipe: [Timing of one decode step at each batch]}, all recipes in turns; each timing is a mean of `steps` steps."""
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
def prefill_times(models: Mapping[str, torch.nn.Module], tokens: int, *, repeats: int = 3) -> dict[str, Timing]:
    """{recipe: Timing of a prefill of `tokens` tokens}, in turns."""

    def one(model):
        text = torch.arange(tokens, device=model.device).remainder(model.config.vocab_size)[None]
        return lambda: model(text, model.new_cache(capacity=tokens), last_only=True)

    calls = {name: one(model) for name, model in models.items()}
    return interleave(calls, repeats=repeats, device=next(iter(models.values())).device)


def decode_times(
    models: Mapping[str, torch.nn.Module], *, prompt_tokens: int = 32, new_tokens: int = 16, repeats: int = 5
) -> dict[str, Timing]:
    """{recipe: Timing of a token after the first}, by the harness of `bench decode`: greedy, in turns."""
    first = next(iter(models.values()))

    def arm(name: str, model) -> Arm:
        def run(prompt: Sequence[int], count: int) -> Run:
            done = generate(model, list(prompt), max_new_tokens=count, end_ids=())
            return Run(done.tokens, done.token_times_s)

        return Arm(name, run)

    arms = [arm(name, model) for name, model in models.items()]
    runs = compare(arms, prompt_ids(first, prompt_tokens), new_tokens, repeats, first.device)
    return {name: Timing(tuple(run.tpot_s for run in kept)) for name, kept in runs.items()}


def break_even(
    batches: Sequence[int], small: Sequence[float], other: Sequence[float], most: int | None = None
) -> int | None:
    """The smallest batch where the step of `small` takes as long as that of `other`; None: not up to `most`.

    Between the given batches seconds are interpolated (straight lines in log-log), beyond the last not at all."""
    if not len(batches) == len(small) == len(other) >= 1:
        raise BadRequest("batches and both lists of seconds must have one length; give one time for each batch.")
    a, b = (Curve(tuple(zip(batches, seconds))) for seconds in (small, other))
    reach = range(min(batches), min(most or max(batches), max(batches)) + 1)
    return next((batch for batch in reach if a(batch) * (1 + 1e-9) >= b(batch)), None)
