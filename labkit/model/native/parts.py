"""Choose the formats of a native decoder's matrices and pack them into one block of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.formats import get_format, get_recipe
from labkit.formats.names import NumberFormat
from labkit.formats.tensor import QuantizedTensor
from labkit.kernels import huge_pages
from labkit.kernels.native import build as native
from labkit.kernels.native.packed import NativePack, block_nbytes, kind_of
from labkit.kernels.packed_weight import PackedWeight
from labkit.model.config import ModelConfig
from labkit.model.decoder import Decoder
from labkit.quant.linear import QuantizedEmbedding, QuantizedLinear

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
MATRICES = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")
Quantizer = Callable[[str, Tensor, NumberFormat], QuantizedTensor]  # name, weight, format


def unsupported_reason(config: ModelConfig, recipe: str = "int4") -> str | None:
    """Return why `accelerate` does not support this model or machine, or None if it does."""
    formats = get_recipe(recipe)
    if reason := unsupported_formats((formats.blocks, formats.head, formats.embedding)):
        return reason
    if config.architecture not in ARCHITECTURES:
        missing = f"{config.architecture}, only {', '.join(ARCHITECTURES)}"
    elif config.latent_dim is not None or config.kv_shared is not None:
        missing = "latent attention or shared layers"
    elif config.head_dim > 512:
        missing = f"a head_dim of {config.head_dim}, only up to 512"
    else:
        return native.unsupported_reason()
    return f"The native kernels do not support {missing}; use the plain decoder."


def unsupported_formats(formats: Iterable[str | NumberFormat]) -> str | None:
    """Return an error for the first format without a native kernel, or None."""
    missing = next((str(name) for name in formats if kind_of(name) is None), None)
    return missing and (
        f"There are no native kernels for {missing}; choose bf16, int8, int4, int4_channel, or "
        "INT4 or INT8 with a group size that is a multiple of 32."
    )


def format_of(module: nn.Module) -> NumberFormat | None:
    """Return the format in which the kernels read a quantized module (None: not quantized)."""
    return native_format(module.weight.format) if isinstance(module.weight, PackedWeight) else None


def native_format(format: NumberFormat) -> NumberFormat:
    """Return the format in which the kernels read weights stored in `format`."""
    if format.offset == "middle" and format.group_size:
        return get_format(f"int{format.bits}_g{format.group_size}_min")
    return format


def formats_of(model: Decoder, recipe: str | None) -> tuple[str, dict[str, NumberFormat]]:
    """Return the name of the recipe ("int4" by default) and the format of each matrix.

    A quantized model keeps its formats, and its plain matrices become bf16. Raises
    BadRequest if a quantized model is given a recipe.
    """
    layers = range(model.config.num_layers)
    blocks = [f"layers.{i}.{name}" for i in layers for name in MATRICES]
    names = ["embed_tokens", *blocks, "head"]
    stored = {name: format_of(model.get_submodule(name)) for name in names}
    first = next((format for format in stored.values() if format is not None), None)
    if first is not None:
        if recipe is not None:
            raise BadRequest(f"This model is quantized already (to {first}); leave the recipe out.")
        return "quantized", {name: f or get_format("bf16") for name, f in stored.items()}
    parts = get_recipe(recipe or "int4")
    special = {"embed_tokens": parts.embedding, "head": parts.head}
    return parts.name, {name: get_format(special.get(name, parts.blocks)) for name in names}


def quantized_of(weight: PackedWeight) -> QuantizedTensor:
    """Return the codes and scales of a packed weight, in the format that the kernels read.

    This rewrites `(code - half) * scale + middle` as `code * scale + minimum`. The minimum
    is rounded to float16, an error of 0.4 % of a step of INT4.
    """
    quantized = weight.quantized()
    format = native_format(quantized.format)
    if format == quantized.format or quantized.offset is None:
        return quantized
    scale = quantized.grid.scale.float()
    minimum = (quantized.offset.float() - (1 << format.bits - 1) * scale).half()
    return replace(quantized, format=format, scale=scale.half(), offset=minimum)


def pack_into(
    into: Decoder,
    model: Decoder,
    formats: dict[str, NumberFormat],
    quantizer: Quantizer,
    consume: bool,
) -> None:
    """Pack every matrix of `model` into the empty decoder `into`, in one block of memory.

    The matrices are stored in the order in which a step reads them. `consume` empties
    `model` matrix by matrix.
    """
    config, tie = into.config, into.config.tie_embeddings
    tied = tie and formats["head"] == formats["embed_tokens"]
    names = [name for name in formats if not (tied and name == "head")]
    modules: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    sizes = []
    for name, module in modules.items():
        size = block_nbytes(formats[name], tuple(module.weight.shape), name.endswith("gate_up"))
        sizes.append(-(-size // 64) * 64)
    arena = huge_pages.zeros(sum(sizes), torch.uint8)
    for (name, module), memory in zip(modules.items(), arena.split(sizes)):
        if isinstance(module.weight, PackedWeight):
            quantized = quantized_of(module.weight)
        else:
            quantized = quantizer(name, module.weight.detach(), formats[name])
        pair, bias = name.endswith("gate_up"), getattr(module, "bias", None)
        weight = NativePack(quantized, pair=pair, bias=bias, out=memory)
        if consume and (name != "embed_tokens" or tied or not tie):
            _empty(module)
        layer = QuantizedEmbedding if name == "embed_tokens" else QuantizedLinear
        into.set_submodule(name, layer(weight))
        if tied and name == "embed_tokens":
            into.set_submodule("head", QuantizedLinear(weight))
    if tied and consume:
        _empty(model.head)
    for name, module in model.named_modules():
        if isinstance(module, nn.RMSNorm):
            norm = nn.RMSNorm(module.normalized_shape, config.norm_eps)
            norm.weight = nn.Parameter(module.weight.detach().float().clone())
            into.set_submodule(name, norm)
    if consume:
        huge_pages.give_back()


def _empty(module: nn.Module) -> None:
    del module.weight
    module.weight = nn.Parameter(torch.empty(0), requires_grad=False)
