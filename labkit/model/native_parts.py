"""What a native decoder is made of: packed matrices as modules, in one piece of memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.formats import get_format, get_recipe
from labkit.formats.integer import Grid
from labkit.formats.names import NumberFormat
from labkit.formats.tensor import QuantizedTensor, from_codes
from labkit.kernels import native
from labkit.kernels.native_pack import PackedMatrix, kind_of, packed_nbytes
from labkit.kernels.weight import PackedWeight
from labkit.measure import pages
from labkit.model.config import ModelConfig
from labkit.model.decoder import Decoder


def why_not(config: ModelConfig, recipe: str = "int4") -> str | None:
    """None where `accelerate` works for this shape and recipe here, else one sentence."""
    formats = get_recipe(recipe)
    if reason := lacking((formats.blocks, formats.head, formats.embedding)):
        return reason
    if config.architecture not in ("llama", "mistral", "qwen2", "qwen3"):
        return f"The native stack computes llama, mistral, qwen2 and qwen3, not {config.architecture}: use the plain decoder."
    if config.latent_dim is not None or config.kv_shared is not None:
        return "The native stack has no latent attention and no shared layers: use the plain decoder."
    if config.head_dim > 512:
        return f"The native attention holds heads of up to 512 numbers, not {config.head_dim}: use the plain decoder."
    return native.why_not()


def lacking(formats: Iterable[str]) -> str | None:
    """None where every format has a native kernel, else one sentence."""
    for name in formats:
        if kind_of(name) is None:
            return f"The native kernels have none for {name}: choose bf16, int8, int4, int4_channel or INT4/INT8 in groups of 32, 64, ..."
    return None


class NativeLinear(nn.Module):
    """y = x Wᵀ + b on a packed matrix: what a layer calls when layers run one by one."""

    def __init__(self, matrix: PackedMatrix):
        super().__init__()
        self.matrix = matrix
        self.register_buffer("blocks", matrix.blocks)  # seen, and counted once, by whoever asks a module for its bytes
        self.register_buffer("scale", matrix.scale)
        self.register_buffer("bias", matrix.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix.matmul(x)


class NativeEmbedding(NativeLinear):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.matrix.rows(tokens)


MATRICES = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")


def format_held(module: nn.Module) -> NumberFormat | None:
    """The format in which the kernels will read what a quantised module holds; None of a plain one."""
    if not isinstance(module.weight, PackedWeight | QuantizedTensor):
        return None
    format = module.weight.format
    grouped_middle = format.offset == "middle" and format.sharing == "group"
    return get_format(f"int{format.bits}_g{format.group_size}_min") if grouped_middle else format


def formats_of(model: Decoder, recipe: str | None) -> tuple[str, dict[str, NumberFormat]]:
    """The recipe's name ("int4" where none is given) and {matrix: format}. A quantised model keeps its own formats, and what
    it left alone is bf16. Raises BadRequest where it is given a recipe too."""
    names = ["embed_tokens", *(f"layers.{i}.{name}" for i in range(model.config.num_layers) for name in MATRICES), "head"]
    held = {name: format_held(model.get_submodule(name)) for name in names}
    found = next((format.name for format in held.values() if format is not None), None)
    if found is not None:
        if recipe is not None:
            raise BadRequest(f"This model is quantised already (to {found}) and cannot be put into {recipe}; leave the recipe out.")
        return "quantised", {name: format or get_format("bf16") for name, format in held.items()}
    wanted = get_recipe(recipe or "int4")
    asked = {"embed_tokens": wanted.embedding, "head": wanted.head}
    return wanted.name, {name: get_format(asked.get(name, wanted.blocks)) for name in names}


def held_by(module: nn.Module) -> QuantizedTensor:
    """What a quantised module holds, in that format. `(code - half the range) * scale + middle` becomes `code * scale + minimum`,
    and the minimum is rounded to float16: 0.4 % of a step of INT4."""
    held = module.weight.quantized() if isinstance(module.weight, PackedWeight) else module.weight
    if held.format.offset != "middle":
        return held
    scale = held.grid().scale.float()
    minimum = (held.grid().offset.float() - (1 << held.format.bits - 1) * scale).half()
    return from_codes(held.unpacked_codes(), Grid(format_held(module), scale.half(), minimum), held.shape)


def pack_into(into: Decoder, model: Decoder, formats: dict[str, NumberFormat], quantizer, consume: bool) -> None:
    """Replace every matrix of `into` (empty so far) by `model`'s in their formats, all in one piece of memory."""
    tied = into.config.tie_embeddings and formats["head"] == formats["embed_tokens"]
    plan = [(name, format, name.endswith("gate_up")) for name, format in formats.items() if not (tied and name == "head")]
    shapes = {name: tuple(model.get_submodule(name).weight.shape) for name, _, _ in plan}
    sizes = {name: -(-packed_nbytes(format, shapes[name], pair) // 64) * 64 for name, format, pair in plan}
    arena, at = pages.zeros(sum(sizes.values()), torch.uint8), 0  # in the order in which a step reads it
    for name, format, pair in plan:
        module = model.get_submodule(name)
        held = quantizer(name, module.weight.detach(), format) if format_held(module) is None else held_by(module)
        matrix = PackedMatrix(held, pair=pair, bias=getattr(module, "bias", None), out=arena[at : at + sizes[name]])
        at += sizes[name]
        if consume and not (name == "embed_tokens" and into.config.tie_embeddings and not tied):
            _empty(module)
        into.set_submodule(name, (NativeEmbedding if name == "embed_tokens" else NativeLinear)(matrix))
    if tied:
        into.head = NativeLinear(into.embed_tokens.matrix)
        if consume:
            _empty(model.head)
    for name, module in model.named_modules():
        if isinstance(module, nn.RMSNorm):
            own = nn.RMSNorm(module.normalized_shape, module.eps)
            own.weight = nn.Parameter(module.weight.detach().float().clone())
            into.set_submodule(name, own)
    if consume:
        pages.give_back()


def _empty(module: nn.Module) -> None:
    del module.weight
    module.weight = nn.Parameter(torch.empty(0), requires_grad=False)
