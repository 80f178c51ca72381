"""Apply PyTorch's dynamic quantization, as most tutorials do.

    model_int8 = torch.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

Each linear layer's weight becomes int8 with *one* scale for the whole matrix; activations are
rounded at run time, to 7 bits on x86. Embeddings do not change, and a head that is
tied to the embedding is stored a second time. PyTorch has deprecated this interface in favour of torchao.
Source: PyTorch's tutorial on dynamic quantization. `published_bytes` counts the bytes, because
the packed weights are neither parameters nor buffers.
"""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn

from labkit.errors import BadRequest


def why_not() -> str | None:
    """Return why the recipe cannot run, or None."""
    if not hasattr(getattr(torch, "quantization", None), "quantize_dynamic"):
        return f"torch {torch.__version__} no longer has torch.quantization.quantize_dynamic."
    if torch.backends.quantized.engine in (None, "none"):
        return "This build of PyTorch has no engine for quantized operators."
    return None


def quantize_dynamic(model: nn.Module) -> nn.Module:
    """Apply the recipe to a copy of a float32 model on the CPU."""
    if reason := why_not():
        raise BadRequest(f"{reason} This part is skipped; use labkit.quant.quantize_model instead.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is obsolete, which is said above
        return torch.quantization.quantize_dynamic(
            copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8
        )


def published_bytes(model: nn.Module) -> dict[str, int]:
    """Return bytes by part: `linear` (int8 codes, scale, zero point), `embedding`, `rest`."""
    found = {"linear": 0, "embedding": 0, "rest": 0}
    for module in model.modules():
        if hasattr(module, "_packed_params") and callable(getattr(module, "weight", None)):
            weight = module.weight()
            found["linear"] += (
                weight.numel() * weight.element_size() + 8 + 8
            )  # a double and an int64 a matrix
            if module.bias() is not None:
                found["rest"] += module.bias().numel() * module.bias().element_size()
    seen = set()
    for module in model.modules():
        for parameter in [*module._parameters.values(), *module._buffers.values()]:
            if (
                parameter is None
                or id(parameter) in seen
                or not isinstance(parameter, torch.Tensor)
            ):
                continue
            seen.add(id(parameter))
            kind = "embedding" if isinstance(module, nn.Embedding) else "rest"
            found[kind] += parameter.numel() * parameter.element_size()
    return found
