"""Choose the kernel that multiplies a packed weight.

    torch     Int8Pack, Int4Pack: PyTorch's operators; TritonPack for other formats on CUDA
    native    NativePack: labkit's own kernels in C++, on CPUs, with activations in INT8
    plain     Plain: dequantize, then multiply; the reference, for every format
    auto      torch, or plain with a warning if torch has no operator for the format

`auto` does not choose `native`, because these weights stay on the CPU and are fastest
in `labkit.model.native.decoder.accelerate`, which runs all layers in one call. To add a
kernel, write a subclass of `PackedWeight` and add it to `KERNELS`.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache

import torch

from labkit.errors import BadRequest
from labkit.formats.names import NumberFormat
from labkit.formats.tensor import QuantizedTensor
from labkit.kernels.native.packed import NativePack
from labkit.kernels.packed_torch import Int4Pack, Int8Pack
from labkit.kernels.packed_weight import PackedWeight, Plain

Device = str | torch.device
Shape = tuple[int, ...]
Classes = tuple[type[PackedWeight], ...]
TORCH: Classes = (Int8Pack, Int4Pack)
KERNELS: dict[str, Classes] = {"auto": TORCH, "torch": TORCH}
KERNELS |= {"native": (NativePack,), "plain": (Plain,)}


def find_kernel(
    format: NumberFormat, shape: Shape, device: Device = "cpu", kernels: str = "torch"
) -> type[PackedWeight] | None:
    """Return the class of `kernels` for this format on `device`, or None."""
    if kernels not in KERNELS:
        raise BadRequest(f"Kernels {kernels!r} are not known; choose one of {', '.join(KERNELS)}.")
    device, classes = torch.device(device), KERNELS[kernels]
    if classes is TORCH and device.type == "cuda" and importlib.util.find_spec("triton"):
        from labkit.kernels.cuda.triton_packed import TritonPack

        classes = (*classes, TritonPack)
    return next((kernel for kernel in classes if kernel.supports(format, shape, device)), None)


def choose_kernel(
    format: NumberFormat, shape: Shape, device: Device = "cpu", kernels: str = "auto"
) -> type[PackedWeight]:
    """Return the kernel class for a weight. Raises BadRequest if `kernels` has none."""
    kernel = find_kernel(format, shape, device, kernels)
    if kernel is None and kernels != "auto":
        raise BadRequest(
            f"The {kernels} kernels do not support {format} {shape} on {device}; choose auto or plain."
        )
    if kernel is None and format.kind != "float":
        warn_no_kernel(format.name, torch.device(device).type)
    return kernel or Plain


def pack_weight(quantized: QuantizedTensor, kernels: str = "auto") -> PackedWeight:
    """Pack a quantized weight in the layout of the kernel that `kernels` selects."""
    return choose_kernel(quantized.format, quantized.shape, quantized.device, kernels)(quantized)


@cache
def warn_no_kernel(name: str, device: str) -> None:
    """Warn that a format is slow; once per format and device."""
    warnings.warn(
        f"{name} has no packed kernel on {device} for this shape. Each call unpacks the weights, "
        "which is slower than float32. int8_channel has one for rows of a multiple of 16 weights, "
        "and int4 in groups of 32, 64, 128 or 256 for a multiple of 64 rows.",
        stacklevel=4,
    )


def resident_nbytes(
    format: NumberFormat, shape: Shape, device: Device = "cpu", kernels: str = "auto"
) -> int:
    """Return the bytes of a weight in the layout of its kernel."""
    return (find_kernel(format, shape, device, kernels) or Plain).resident_nbytes(format, shape)
