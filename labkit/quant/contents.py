"""What a quantised model consists of: the tensors that a checkpoint stores, each once, and what its header says of every layer.

Codes stay packed as the formats promise; a weight that two layers share is stored under the first one's name, and a
parameter that is tied without being quantised is an alias.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.kernels.packed import PackedWeight, Plain
from labkit.quant.linear import QuantizedEmbedding, QuantizedLinear
from labkit.quant.w8a8 import W8A8Weight


def contents(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, dict]]:
    """(tensors to store, the header's layers) of a quantised model."""
    tensors: dict[str, Tensor] = {}
    layers: dict[str, dict] = {}
    packed: dict[int, str] = {}
    inside: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        weight = getattr(module, "weight", None)
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            kind = "linear" if isinstance(module, QuantizedLinear) else "embedding"
        elif isinstance(module, Plain) and name.endswith("_packed"):
            kind, weight, name = "experts", module, name.removesuffix("_packed")
        else:
            continue
        held = weight.quantized()
        dtype = str(module.like.dtype if kind == "embedding" else torch.float32).removeprefix("torch.")
        layers[name] = {
            "kind": kind, "format": held.format.name, "shape": list(held.shape), "kernel": kernel_of(weight), "dtype": dtype,
            "bias": getattr(module, "bias", None) is not None, "scale": getattr(module, "scale", 1.0) if kind == "embedding" else 1.0,
            "shared_with": packed.get(id(weight)),
        }  # fmt: skip
        inside.add(f"{name}_packed." if kind == "experts" else f"{name}.weight.")
        if id(weight) not in packed:
            packed[id(weight)] = name
            tensors |= {f"{name}.weight.{part}": tensor.contiguous() for part, tensor in held.tensors().items()}
    seen: dict[int, str] = {}
    for name, tensor in model.state_dict().items():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        if tensor.data_ptr() in seen and tensor.numel():  # tied and not quantised: stored once
            layers[name] = {"kind": "alias", "shared_with": seen[tensor.data_ptr()]}
            continue
        seen[tensor.data_ptr()] = name
        tensors[name] = tensor.contiguous()
    return tensors, layers


def kernel_of(weight: PackedWeight) -> str:
    return "w8a8" if isinstance(weight, W8A8Weight) else "auto" if weight.fast else "plain"
