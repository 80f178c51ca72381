"""Compute linear layers and embeddings on packed weights.

The layers replace `nn.Linear` and `nn.Embedding` and are called in the same way. The
weight is a `PackedWeight` module (`labkit.kernels.packed_weight`). A tied head and
embedding share this module, so its bytes are counted, moved and saved once. In a
float32 model the packed kernels still multiply in bfloat16, because PyTorch's operators
have no other fast path. The residual stream keeps the model's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from labkit.formats.tensor import QuantizedTensor
from labkit.kernels.packed_weight import PackedWeight, Plain
from labkit.kernels.registry import pack_weight

Packed = QuantizedTensor | PackedWeight


def _packed(weight: Packed, kernel: str) -> PackedWeight:
    return weight if isinstance(weight, PackedWeight) else pack_weight(weight, kernel)


class QuantizedLinear(nn.Module):
    """y = x W^T + bias with a packed W [N, K]."""

    def __init__(self, weight: Packed, bias: Tensor | None = None, kernel: str = "auto"):
        super().__init__()
        self.weight = _packed(weight, kernel)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.out_features, self.in_features = self.weight.shape

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        return self.weight.matmul(x, self.bias)

    def extra_repr(self) -> str:
        kernel = type(self.weight).__name__
        return f"{self.in_features} -> {self.out_features}, {self.weight.format}, {kernel}"


class QuantizedEmbedding(nn.Module):
    """An embedding that unpacks only the rows that it looks up.

    The output has `dtype`, and `model.to(dtype)` changes it. The rows are multiplied by
    `scale`, as Gemma does.
    """

    weight: PackedWeight
    like: Tensor

    def __init__(
        self,
        weight: Packed,
        dtype: torch.dtype = torch.float32,
        kernel: str = "auto",
        scale: float = 1.0,
    ):
        super().__init__()
        self.weight = _packed(weight, kernel)
        self.num_embeddings, self.embedding_dim = self.weight.shape
        like = torch.empty(0, dtype=dtype, device=self.weight.device)
        self.register_buffer("like", like, persistent=False)
        self.scale = scale

    def forward(self, index: Tensor) -> Tensor:  # [...] -> [..., K]
        rows = self.weight.rows(index, self.like.dtype)
        return rows if self.scale == 1.0 else rows * self.scale

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} x {self.embedding_dim}, {self.weight.format}"


def install(model: nn.Module, name: str, weight: Packed, kernel: str = "auto") -> None:
    """Replace the layer or fused expert parameter `name` by its packed version."""
    parent_name, _, leaf = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    old = getattr(parent, leaf)
    if isinstance(old, nn.Parameter):
        _install_parameter(parent, leaf, weight)
        return
    if isinstance(old, nn.Embedding):
        scale = float(getattr(old, "embed_scale", 1.0))
        new: nn.Module = QuantizedEmbedding(weight, old.weight.dtype, kernel, scale)
    else:
        new = QuantizedLinear(weight, old.bias, kernel)
    setattr(parent, leaf, new.train(old.training))


def _install_parameter(module: nn.Module, name: str, weight: Packed) -> None:
    """Replace a parameter outside of layers by a packed weight that is unpacked on each use."""
    dtype = getattr(module, name).dtype
    delattr(module, name)
    packed = weight if isinstance(weight, PackedWeight) else Plain(weight)
    module.add_module(f"{name}_packed", packed)
    read = property(lambda self: getattr(self, f"{name}_packed").quantized().dequantize(dtype))
    module.__class__ = type(type(module).__name__, (type(module),), {name: read})


def unpack_model(model: nn.Module) -> nn.Module:
    """Replace packed layers in place by float32 ones with exactly the same numbers.

    Use this to measure the loss of a format alone: the weights are quantized, and the
    arithmetic is that of the unchanged model. Tied layers stay tied. An embedding with a
    scale stays packed. The result is as large and as slow as the original model.
    """
    weights: dict[PackedWeight, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            new: Any = nn.Linear(1, 1, bias=False)
            new.in_features, new.out_features = module.in_features, module.out_features
            new.bias = module.bias
        elif isinstance(module, QuantizedEmbedding) and module.scale == 1.0:
            new = nn.Embedding(1, 1)
            new.num_embeddings, new.embedding_dim = module.num_embeddings, module.embedding_dim
        else:
            continue
        packed = module.weight
        if packed not in weights:
            unpacked = packed.quantized().dequantize()
            weights[packed] = nn.Parameter(unpacked, requires_grad=False)
        new.weight = weights[packed]
        model.set_submodule(name, new.train(module.training))
    return model
