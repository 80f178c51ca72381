"""Layers that hold a quantised weight: a linear layer, an embedding, and both at once where they are tied.

They are called as the layers they replace. The weight is a `PackedWeight` module (labkit.kernels.packed), so one object
may serve head and embedding: one set of bytes, counted, moved and saved once. Inside a float32 model the packed kernels
still multiply in bfloat16 (their operators know nothing else fast); the residual stream keeps the model's own dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.formats import get_format
from labkit.formats.names import NumberFormat
from labkit.formats.tensor import QuantizedTensor
from labkit.formats.tensor import quantize as round_to_nearest
from labkit.kernels.packed import PackedWeight, pack_weight

__all__ = ["QuantizedEmbedding", "QuantizedLinear", "QuantizedTensor", "quantize"]


def quantize(
    weight: Tensor, format: str | NumberFormat, calibration=None, method: str | None = None, **options
) -> QuantizedTensor:
    """One weight [N, K] in `format`. Without calibration: round to nearest; with it (`calibrate.InputStatistics` of
    this layer): GPTQ unless another method is named. AWQ needs the preceding operation as well: `walk.quantize_model`."""
    if method is None:
        method = "rtn" if calibration is None else "gptq"
    if method == "rtn":
        return round_to_nearest(weight, format)
    from labkit.quant.methods import quantize_weight

    return quantize_weight(weight, get_format(format), method, calibration, **options)


class QuantizedLinear(nn.Module):
    """y = x W^T + bias with W [N, K] packed."""

    def __init__(self, weight: QuantizedTensor | PackedWeight, bias: Tensor | None = None, kernel: str = "auto"):
        super().__init__()
        self.weight = weight if isinstance(weight, PackedWeight) else pack_weight(weight, kernel)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.out_features, self.in_features = self.weight.shape

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        return self.weight.matmul(x, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.weight.format}, {type(self.weight).__name__}"


class QuantizedEmbedding(nn.Module):
    """Rows looked up and unpacked, never the table. `dtype` is the model's; it follows `model.to(dtype)`."""

    def __init__(
        self,
        weight: QuantizedTensor | PackedWeight,
        dtype: torch.dtype = torch.float32,
        kernel: str = "auto",
        scale: float = 1.0,
    ):
        super().__init__()
        self.weight = weight if isinstance(weight, PackedWeight) else pack_weight(weight, kernel)
        self.num_embeddings, self.embedding_dim = self.weight.shape
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=self.weight.device), persistent=False)
        self.scale = scale

    def forward(self, index: Tensor) -> Tensor:  # [...] -> [..., K]
        rows = self.weight.rows(index, self.like.dtype)
        return rows if self.scale == 1.0 else rows * self.scale

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} x {self.embedding_dim}, {self.weight.format}"
