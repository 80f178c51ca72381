"""Time one matrix product from plain to packed: the same numbers in five kernels.

    float32        4 bytes per weight, PyTorch's product
    bfloat16       2 bytes per weight, the same operator
    unpacked       the format's bits, dequantized to float32 on every call, then multiplied
    packed         the format's bits, unpacked inside PyTorch's operator (if it has one)
    native         the format's bits in labkit's own order, activations in INT8

Each kernel has enough copies of the matrix that none is in the last-level cache when its turn
comes again, as in a model. When it loses: above some number of rows arithmetic is the limit and
bytes no longer matter; `climb(rows=...)` shows where.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.formats import get_format, round_to_nearest
from labkit.kernels.native import build as native
from labkit.kernels.native.packed import NativePack
from labkit.kernels.packed_weight import PackedWeight, Plain
from labkit.kernels.registry import find_kernel
from labkit.lab.bench.operators import cold_copies, linear_of_ones
from labkit.lab.measure.clock import Timing, interleave


@dataclass
class Rung:
    """One kernel: bytes per weight, and copies of the weight that multiply x [rows, columns]."""

    name: str
    nbytes: int
    copies: list[Callable[[Tensor], Tensor]]
    dtype: torch.dtype


@torch.inference_mode()
def ladder(weight: Tensor, format: str = "int4_g32_min") -> dict[str, Rung]:
    """Return the kernels that this machine has for `weight` [N, K] float32, by name."""
    held = round_to_nearest(weight, format)
    numbers = held.dequantize()
    rungs = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        layer = linear_of_ones(*weight.shape, dtype, "cpu")
        layer.weight.copy_(numbers)
        rungs[name] = _rung(name, layer.weight.nbytes, layer, dtype)
    plain = Plain(held)
    # Few copies: each call writes and reads so many floats that nothing stays in a cache anyway.
    rungs["unpacked"] = Rung(
        "unpacked", held.nbytes, [plain.matmul, copy.deepcopy(plain).matmul], torch.float32
    )
    way = find_kernel(get_format(format), tuple(weight.shape))
    if way is not None:
        rungs["packed"] = _rung(
            "packed", held.nbytes, way(held), torch.bfloat16, lambda w: w.matmul
        )
    if native.unsupported_reason() is None:
        rungs["native"] = native_rung(NativePack(held))
    return rungs


def native_rung(weight: PackedWeight) -> Rung:
    return _rung("native", weight.nbytes, weight, torch.float32, lambda w: w.matmul)


def _rung(name: str, nbytes: int, layer, dtype, call=lambda layer: layer) -> Rung:
    layers = [layer, *(copy.deepcopy(layer) for _ in range(cold_copies(nbytes) - 1))]
    return Rung(name, nbytes, [call(one) for one in layers], dtype)


@torch.inference_mode()
def climb(rungs: dict[str, Rung], rows: int = 1, repeats: int = 7) -> dict[str, Timing]:
    """Time one product of each kernel, interleaved; a timing walks over all copies."""
    columns = _columns(rungs)

    def walk(rung: Rung) -> Callable[[], None]:
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(rung.dtype)

        def call() -> None:
            for multiply in rung.copies:
                multiply(x)

        return call

    timings = interleave(
        {name: walk(rung) for name, rung in rungs.items()}, repeats=repeats, warmup=1
    )
    return {
        n: Timing(tuple(t / len(rungs[n].copies) for t in timing.times_s))
        for n, timing in timings.items()
    }


def _columns(rungs: dict[str, Rung]) -> int:
    first = next(iter(rungs.values())).copies[0]
    return first.in_features if hasattr(first, "in_features") else first.__self__.shape[1]


@contextmanager
def instruction_set(name: str):
    """Use the native kernels of one instruction set (`LABKIT_NATIVE`); compile them if needed."""
    before = os.environ.get("LABKIT_NATIVE")
    os.environ["LABKIT_NATIVE"] = name
    try:
        yield
    finally:
        os.environ.pop("LABKIT_NATIVE") if before is None else os.environ.__setitem__(
            "LABKIT_NATIVE", before
        )


def on_instruction_sets(
    weight: Tensor, names: Sequence[str], format: str = "int4_g32_min", rows: int = 1
) -> dict[str, Timing]:
    """Time the native product with each instruction set, one after the other."""
    rung = native_rung(NativePack(round_to_nearest(weight, format)))
    found = {}
    for name in names:
        with instruction_set(name):
            found[name] = climb({name: rung}, rows)[name]
    return found
