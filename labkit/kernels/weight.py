"""The weight of a linear layer in one operator's layout: what every packed kernel has in common.

Its tensors are buffers, so they move, save and count with the model. One to `few` rows (16 unless a kernel says more) go to the operator that reads
the packed bits. Above (prefill) the weight is unpacked into a temporary bfloat16 matrix for one ordinary product and
thrown away: no second copy stays. `quantized` gives back exactly what is held, so that a checkpoint is written from it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.formats.names import NumberFormat
from labkit.formats.tensor import QuantizedTensor

FEW_ROWS = 16


class PackedWeight(nn.Module):
    """A weight [N, K] in one operator's layout: its tensors are buffers, so that they move, save and count with the model."""

    fast = True
    few = FEW_ROWS

    def __init__(self, shape: tuple[int, int], format: NumberFormat):
        super().__init__()
        self.shape, self.format = tuple(shape), format

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype."""
        flat = x.reshape(-1, x.shape[-1]).bfloat16().contiguous()  # [M, K]
        if flat.shape[0] <= self.few:
            out = self.few_rows(flat)
        else:
            out = F.linear(flat, self.unpacked())
        out = out.float() if x.dtype == torch.float32 else out.to(x.dtype)  # the short names cost half in dispatch
        out = out.view(x.shape[:-1] + out.shape[-1:])
        return out if bias is None else out + bias

    def few_rows(self, flat: Tensor) -> Tensor:  # [M, K] -> [M, N]
        raise NotImplementedError

    def unpacked(self) -> Tensor:
        """The whole weight in bfloat16 [N, K], temporary."""
        return self.quantized().dequantize(torch.bfloat16)

    def quantized(self) -> QuantizedTensor:
        """What is held, exactly."""
        raise NotImplementedError

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Embedding look-up [..., K]."""
        return self.quantized().rows(index).to(dtype)

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device

    def _apply(self, fn, recurse=True):
        """`model.float()` and `.to(dtype)` move stored bits; they never re-interpret them."""
        for name, tensor in self._buffers.items():
            moved = fn(tensor)
            self._buffers[name] = moved if moved.dtype == tensor.dtype else tensor.to(moved.device)
        return self
