"""Dynamic W8A8: multiply 8-bit weights by 8-bit activations with a scale per token.

    y[m, n] = (sum over k of xq[m, k] wq[n, k]) * sx[m] * sw[n]    exact, in int32

Each token has its own scale, so a token with a huge value loses precision only for
itself. No calibration is needed. W8A8 saves arithmetic (prefill, large batches) on
hardware with int8 dot products. Source: Dettmers et al., LLM.int8(), 2022; Yao et al.,
ZeroQuant, 2022.

When it loses: in decode it reads as many bytes as int8_channel and rounds x in
addition. It loses accuracy if some *input channels* are outliers in every token,
because these determine the scale of each token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.formats.tensor import QuantizedTensor
from labkit.kernels.packed_weight import PackedWeight


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [M, K] to codes int8 [M, K] and scales float32 [M, 1].

    NaN and infinity give NaN scales.
    """
    reach = x.float().abs().amax(-1, keepdim=True)
    scale = (reach / 127).clamp(min=2.0**-126)
    codes = torch.round(x.float() / scale).clamp_(-127, 127).to(torch.int8)
    return codes, torch.where(torch.isfinite(reach), scale, torch.nan)


def reference(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """Compute x [M, K] times the weight [N, K] exactly, in float64."""
    codes, scale = quantize_tokens(x)
    sums = codes.double() @ weight.codes.double().T
    return (sums * scale.double() * weight.grid.scale.double().view(1, -1)).to(x.dtype)


class W8A8Weight(PackedWeight):
    """int8_channel codes [N, K], multiplied as integers (`torch._int_mm`)."""

    codes: Tensor
    scale: Tensor

    def __init__(self, weight: QuantizedTensor):
        if weight.format.name != "int8_channel":
            text = f"The weights are {weight.format.name}; W8A8 needs int8_channel"
            raise BadRequest(f"{text}, so set the recipe's blocks to int8_channel.")
        super().__init__(weight)
        self._store(codes=weight.codes, scale=weight.grid.scale.view(-1))

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        codes, scale = quantize_tokens(flat)
        if x.is_cuda and len(codes) <= 16:  # cuBLAS needs more than 16 rows
            codes = nn.functional.pad(codes, (0, 0, 0, 17 - len(codes)))
        sums = torch._int_mm(codes, self.codes.t())[: len(flat)]  # [M, N] int32
        out = (sums.float() * scale * self.scale.float()).to(x.dtype)
        return (out if bias is None else out + bias).view(*x.shape[:-1], self.shape[0])

    def quantized(self) -> QuantizedTensor:
        return QuantizedTensor(self.format, self.shape, self.codes, self.scale[:, None])
