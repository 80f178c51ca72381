"""`bench kernels`: the products of one layer, kernel against kernel, with weights that come from memory.

An arm is `KERNELS:FORMAT`: `torch` is PyTorch's operator for the packed format (or its plain product), `native` is labkit's
own. Each call walks over so many copies of a layer's four matrices that none is still in the last-level cache when its
turn comes again, as in a decode step. Share of bandwidth = stored bytes / seconds / read-only bandwidth.
When it loses: it is products alone; `bench decode --explain` says what share of a step they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch

from labkit.bench.arms import DTYPES
from labkit.bench.harness import ratio_lines, ratios, summary, table
from labkit.bench.operators import cold_copies
from labkit.errors import BadRequest
from labkit.formats import get_format, get_recipe, quantize
from labkit.kernels import native
from labkit.kernels.native_pack import PackedMatrix, kind_of
from labkit.measure.bandwidth import read_bandwidth, using_threads
from labkit.measure.bytes import tensor_bytes
from labkit.measure.clock import interleave
from labkit.plan.memory import resolve
from labkit.plan.predict import fused_products
from labkit.quant.linear import QuantizedLinear


def run(
    model="default",
    formats: Sequence[str] = ("fp32", "bf16", "int8", "int4"),
    rows: int = 1,
    threads: int | None = None,
    repeats: int = 7,
    device="cpu",
    on_progress: Callable[[str], None] | None = None,
) -> dict:
    """The keys of the command `bench kernels`."""
    if rows < 1 or repeats < 1:
        raise BadRequest(f"{rows} rows and {repeats} repeats time nothing; give at least 1 of each.")
    shapes = fused_products(resolve(model))
    with using_threads(threads) as used, torch.inference_mode():
        bandwidth = read_bandwidth(device, used)
        arms, sizes = {}, {}
        for recipe in formats:
            for name, layer in _layers(recipe, shapes, device).items():
                if on_progress:
                    on_progress(f"packing {name}")
                arms[name], sizes[name] = _call(layer, rows, shapes, recipe, device)
        timings = interleave({name: call for name, (call, _) in arms.items()}, repeats=repeats, warmup=1, device=device)
    seconds = {name: [t / arms[name][1] for t in timing.times_s] for name, timing in timings.items()}
    pairs = ratios(seconds)
    entries = {}
    for name, times in seconds.items():
        middle, low, high = summary(times)
        entries[name] = {"us": 1e6 * middle, "us_low": 1e6 * low, "us_high": 1e6 * high, "bytes": sizes[name],
                         "gb_s": sizes[name] / middle / 1e9, "bandwidth_share": sizes[name] / middle / bandwidth}  # fmt: skip
    return {
        "arms": entries,
        "ratios": {pair: ratio.value for pair, ratio in pairs.items()},
        "ratio_intervals": {pair: [ratio.low, ratio.high] for pair, ratio in pairs.items()},
        "bandwidth_gb_s": bandwidth / 1e9, "threads": used, "device": str(device), "model": str(model), "rows": rows,
        "repeats": repeats,
    }  # fmt: skip


def _layers(recipe: str, shapes, device) -> dict[str, list]:
    """{arm: the four products of a layer, each a function of x}; formats without a native kernel have one arm."""
    format = get_format(get_recipe(recipe).blocks)
    weights = [_ramp(*shape) for shape in shapes]
    if format.kind == "float":
        plain = [torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=DTYPES[format.name], device=device) for w in weights]
        found = {f"torch:{recipe}": plain}
    else:
        found = {f"torch:{recipe}": [QuantizedLinear(quantize(w.to(device), format)) for w in weights]}
    if torch.device(device).type == "cpu" and kind_of(format) is not None and native.why_not() is None:
        found[f"native:{recipe}"] = [PackedMatrix(quantize(w, format)) for w in weights]
    return found


def _ramp(rows: int, columns: int) -> torch.Tensor:
    """Numbers from -1 to 1: as slow to multiply as any others, and no group's scale is zero."""
    return torch.linspace(-1, 1, columns).expand(rows, columns).contiguous()


def _call(layer: list, rows: int, shapes, recipe: str, device):
    """A function that runs many copies of the layer, how many; and the bytes of one."""
    native_kernel = isinstance(layer[0], PackedMatrix)
    size = sum(m.nbytes for m in layer) if native_kernel else tensor_bytes(*layer)
    layers = [layer, *(_copy(layer) for _ in range(cold_copies(size) - 1))]
    dtype = torch.float32 if native_kernel else DTYPES.get(get_recipe(recipe).name, torch.bfloat16)
    inputs = [torch.randn(rows, columns, dtype=dtype, device=device) for _, columns in shapes]

    def call() -> None:
        for products in layers:
            for product, x in zip(products, inputs):
                product.matmul(x) if native_kernel else product(x)

    return (call, len(layers)), size


def _copy(layer: list) -> list:
    return [matrix.copy() for matrix in layer] if isinstance(layer[0], PackedMatrix) else copy.deepcopy(layer)


def render(result: dict) -> str:
    """The result as a table for people."""
    rows = [
        (name, f"{a['us']:.1f}", f"{a['us_low']:.1f}-{a['us_high']:.1f}", f"{a['bytes'] / 2**20:.2f}", f"{a['gb_s']:.1f}",
         f"{a['bandwidth_share']:.0%}")
        for name, a in result["arms"].items()
    ]  # fmt: skip
    head = (
        f"kernels: the products of one layer of {result['model']} for {result['rows']} rows, {result['threads']} threads on "
        f"{result['device']}; read-only bandwidth {result['bandwidth_gb_s']:.1f} GB/s"
    )
    body = table(("arm", "us", "interval", "MiB", "GB/s", "of bandwidth"), rows)
    return "\n".join([head, body, "ratios of rates, paired by round:", ratio_lines(result)])
