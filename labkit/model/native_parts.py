"""What a native decoder is made of: packed matrices as modules, in one piece of memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.formats import get_format
from labkit.formats.tensor import QuantizedTensor
from labkit.kernels.native_pack import PackedMatrix, packed_nbytes
from labkit.measure import pages
from labkit.model.decoder import Decoder


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


def pack_into(native: Decoder, model: Decoder, recipe, quantizer, consume: bool) -> None:
    """Replace every matrix of `native` (empty so far) by `model`'s in the recipe's formats, all in one piece of memory."""
    plan = [("embed_tokens", recipe.embedding, False)]
    for i in range(native.config.num_layers):
        for name in ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down"):
            plan.append((f"layers.{i}.{name}", recipe.blocks, name == "mlp.gate_up"))
    tied = native.config.tie_embeddings and get_format(recipe.head) == get_format(recipe.embedding)
    if not tied:
        plan.append(("head", recipe.head, False))
    shapes = {name: tuple(model.get_submodule(name).weight.shape) for name, _, _ in plan}
    sizes = {name: -(-packed_nbytes(format, shapes[name], pair) // 64) * 64 for name, format, pair in plan}
    arena, at = pages.zeros(sum(sizes.values()), torch.uint8), 0  # in the order in which a step reads it
    for name, format, pair in plan:
        module = model.get_submodule(name)
        held = (
            module.weight
            if isinstance(module.weight, QuantizedTensor)
            else quantizer(name, module.weight.detach(), format)
        )
        bias = getattr(module, "bias", None)
        matrix = PackedMatrix(held, pair=pair, bias=bias, out=arena[at : at + sizes[name]])
        at += sizes[name]
        if consume and not (name == "embed_tokens" and native.config.tie_embeddings and not tied):
            module.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        native.set_submodule(name, (NativeEmbedding if name == "embed_tokens" else NativeLinear)(matrix))
    if tied:
        native.head = NativeLinear(native.embed_tokens.matrix)
        if consume:
            model.head.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    for name, module in model.named_modules():
        if isinstance(module, nn.RMSNorm):
            own = nn.RMSNorm(module.normalized_shape, module.eps)
            own.weight = nn.Parameter(module.weight.detach().float().clone())
            native.set_submodule(name, own)
    if consume:
        pages.give_back()
