"""Dynamic W8A8: 8-bit weights times 8-bit activations, the activations' scale found per token at run time.

    y[m, n] = (sum over k of xq[m, k] wq[n, k]) * sx[m] * sw[n]        sums in int32: exact

One scale a token (not a tensor): a token with a huge value costs only itself. Source: Dettmers et al., LLM.int8(), 2022;
Yao et al., ZeroQuant, 2022. Calibration-free. What it buys is arithmetic (prefill, large batches) on hardware with int8
dot products; in decode the bytes are those of int8_channel and the rounding of x is an extra step.
Loses accuracy where single *input channels* are outliers in every token: they set each token's scale.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.formats import quantize
from labkit.formats.tensor import QuantizedTensor
from labkit.kernels.packed import PackedWeight


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> codes int8 [M, K], scale float32 [M, 1]; NaN and infinity are refused upstream or stay visible as NaN."""
    reach = x.float().abs().amax(-1, keepdim=True)
    scale = (reach / 127).clamp(min=2.0**-126)
    return torch.round(x.float() / scale).clamp_(-127, 127).to(torch.int8), torch.where(
        torch.isfinite(reach), scale, torch.nan
    )


def reference(x: Tensor, held: QuantizedTensor) -> Tensor:
    """The plain way, in float64, where sums of 8-bit products are exact."""
    codes, scale = quantize_tokens(x)
    weight = held.unpacked_codes().double()
    return (codes.double() @ weight.T * scale.double() * held.scale.double().view(1, -1)).to(x.dtype)


class W8A8Weight(PackedWeight):
    """int8_channel codes [N, K], multiplied as integers (`torch._int_mm`)."""

    def __init__(self, held: QuantizedTensor):
        if held.format.name != "int8_channel":
            raise BadRequest(
                f"W8A8 multiplies int8_channel weights, and these are {held.format.name}; set the recipe's blocks to int8_channel."
            )
        super().__init__(held.shape, held.format)
        self.register_buffer("codes", held.codes.view(torch.int8))
        self.register_buffer("scale", held.scale.view(-1))

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        codes, scale = quantize_tokens(flat)
        if x.is_cuda and len(codes) <= 16:  # cuBLAS takes more than 16 rows only
            codes = nn.functional.pad(codes, (0, 0, 0, 17 - len(codes)))
        sums = torch._int_mm(codes, self.codes.t())[: len(flat)]  # [M, N] int32
        out = (sums.float() * scale * self.scale.float()).to(x.dtype)
        return (out if bias is None else out + bias).view(*x.shape[:-1], self.shape[0])

    def quantized(self) -> QuantizedTensor:
        return QuantizedTensor(self.format, self.shape, self.codes.view(torch.uint8), self.scale[:, None])


def w8a8_weight(weight: Tensor) -> W8A8Weight:
    return W8A8Weight(quantize(weight, "int8_channel"))
