"""`bench kernels`: the products of one layer, with weights read from memory.

An arm is `KERNELS:FORMAT`: `torch` is PyTorch's operator for the packed format (or its
plain product), `native` is labkit's own. Each call multiplies several copies of a
layer's four matrices. Together they do not fit into the last-level cache, as in a
decode step. Share of bandwidth = stored bytes / seconds / read-only bandwidth.
Limitation: only products are timed; `bench decode --explain` shows their share of a
step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch

from labkit.errors import whole_number
from labkit.formats import get_format, get_recipe, round_to_nearest, torch_dtype
from labkit.kernels.native import build as native
from labkit.kernels.registry import find_kernel
from labkit.lab.bench import harness
from labkit.lab.bench.harness import Progress, check_arms, silent
from labkit.lab.bench.operators import cold_copies, linear_of_ones
from labkit.lab.measure.bandwidth import read_bandwidth, using_threads
from labkit.lab.measure.bytes import tensor_bytes
from labkit.lab.measure.clock import interleave
from labkit.lab.plan.memory import resolve
from labkit.lab.plan.operator_times import fused_products
from labkit.quant.linear import QuantizedLinear

COLUMNS = {
    "us": "{us:.1f}",
    "interval": "{us_low:.1f}-{us_high:.1f}",
    "bytes": "{bytes:,}",
    "GB/s": "{gb_s:.1f}",
    "of bandwidth": "{bandwidth_share:.0%}",
}
HEADLINE = (
    "kernels: the products of one layer of {model} for {rows} rows, {threads} threads on "
    "{device}; read-only bandwidth {bandwidth_gb_s:.1f} GB/s"
)


def run(
    model="default",
    formats: Sequence[str] = ("fp32", "bf16", "int8", "int4"),
    rows: int = 1,
    threads: int | None = None,
    repeats: int = 7,
    device="cpu",
    on_progress: Progress = silent,
) -> dict:
    """Return the result of `bench kernels`; `model` may be a ModelShape."""
    whole_number(rows, "rows", 1)
    check_arms(formats)
    shapes = fused_products(resolve(model))
    arms: dict[str, list] = {}
    seconds, entries = {}, {}
    with using_threads(threads) as used, torch.inference_mode():
        bandwidth = read_bandwidth(device, used)
        for recipe in formats:
            on_progress(f"packing {recipe}")
            arms |= layers(recipe, shapes, device)
        sizes = {name: tensor_bytes(*layer) for name, layer in arms.items()}
        inputs = [torch.randn(rows, columns, device=device) for _, columns in shapes]
        calls = {
            name: _call(layer, cold_copies(sizes[name]), inputs) for name, layer in arms.items()
        }
        timings = interleave(calls, repeats=repeats, device=device)
    for name, size in sizes.items():
        seconds[name] = [t / cold_copies(size) for t in timings[name].times_s]
        entry = harness.spread("us", seconds[name], 1e6) | {"bytes": size}
        entry["gb_s"] = size / entry["us"] / 1000
        entries[name] = entry | {"bandwidth_share": 1e9 * entry["gb_s"] / bandwidth}
    return {
        "arms": entries,
        **harness.ratio_keys(harness.ratios(seconds)),
        "bandwidth_gb_s": bandwidth / 1e9,
        "threads": used,
        "device": str(device),
        "model": str(model),
        "rows": rows,
        "repeats": repeats,
    }


def layers(recipe: str, shapes: Sequence[tuple[int, int]], device) -> dict[str, list]:
    """Return {arm: the four products of a layer}; few formats have native kernels."""
    format = get_format(get_recipe(recipe).blocks)
    # A ramp from -1 to 1 takes as long to multiply as other numbers, and no scale is 0.
    ramps = [torch.linspace(-1, 1, k, device=device).expand(n, k) for n, k in shapes]
    weights = [round_to_nearest(ramp, format) for ramp in ramps]
    if format.kind == "float":
        dtype = torch_dtype(format.name)
        arms = {f"torch:{recipe}": [linear_of_ones(n, k, dtype, device) for n, k in shapes]}
    else:
        arms = {f"torch:{recipe}": [QuantizedLinear(weight) for weight in weights]}
    has_native = find_kernel(format, shapes[0], device, "native") is not None
    if has_native and native.unsupported_reason() is None:
        arms[f"native:{recipe}"] = [QuantizedLinear(weight, kernel="native") for weight in weights]
    return arms


def _call(layer: list, copies: int, inputs: list[torch.Tensor]) -> Callable[[], None]:
    """Return a function that multiplies `inputs` by `copies` copies of a layer."""
    products = [layer, *(copy.deepcopy(layer) for _ in range(copies - 1))]
    inputs = [x.to(layer[0].weight.dtype) for x in inputs]

    def call() -> None:
        for one in products:
            for product, x in zip(one, inputs):
                product(x)

    return call


def render(result: dict) -> str:
    """Return the result as a table."""
    return harness.render(result, HEADLINE, COLUMNS)
