"""Define the interface of packed weights: the weight of a linear layer in a kernel's layout.

A packed weight multiplies (`matmul`), looks up rows (`rows`), returns the stored weight
(`quantized`, `unpacked`), and has a `format` and `nbytes`. Its tensors are buffers, so
PyTorch moves, saves and counts them with the model. `labkit.kernels.registry` chooses
the class.

In decode each weight is read once and used once, so its bytes decide the time.
Unpacking the whole matrix first would read and write many more bytes than packing
saves. Products of 1 to `few` rows therefore use an operator that reads the packed bits.
For more rows (prefill), the weight is unpacked into a temporary bfloat16 matrix for one
ordinary product.

When it loses: above about 16 rows, arithmetic limits the time, not bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.formats.names import NumberFormat
from labkit.formats.tensor import QuantizedTensor, pick_rows

FEW_ROWS = 16
Shape = tuple[int, ...]
Tensors = Mapping[str, Tensor]


class PackedWeight(nn.Module):
    """A weight [N, K] in one kernel's layout, made from a `QuantizedTensor`."""

    fast = True
    few = FEW_ROWS  # the largest number of rows for `few_rows`
    dtype = torch.bfloat16  # of activations that are read without a cast

    def __init__(self, quantized: QuantizedTensor):
        super().__init__()
        self.format, self.shape = quantized.format, tuple(quantized.shape)

    def _store(self, **buffers: Tensor | None) -> None:
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    @classmethod
    def supports(cls, format: NumberFormat, shape: Shape, device: torch.device) -> bool:
        """Return True if this kernel can multiply such a weight on `device`."""
        return True

    @classmethod
    def resident_nbytes(cls, format: NumberFormat, shape: Shape) -> int:
        """Return the bytes of such a weight in this layout."""
        return format.nbytes(shape)

    @classmethod
    def from_packed(cls, format: NumberFormat, shape: Shape, packed: Tensors) -> PackedWeight:
        """Make the weight from its portable form (`QuantizedTensor.packed`)."""
        return cls(QuantizedTensor.from_packed(format, shape, packed))

    def packed(self) -> dict[str, Tensor]:
        """Return the stored weight in its portable form."""
        return self.quantized().packed()

    def quantized(self) -> QuantizedTensor:
        """Return the stored codes and scales, unchanged."""
        raise NotImplementedError(f"{type(self).__name__} does not return its codes.")

    def unpacked(self) -> Tensor:
        """Return the weight [N, K], in bfloat16 or the dtype the kernel works in."""
        return self.quantized().dequantize(torch.bfloat16)

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [..., K] -> [..., N] in x's dtype."""
        flat = x.reshape(-1, x.shape[-1]).bfloat16().contiguous()  # [M, K]
        out = self.few_rows(flat) if flat.shape[0] <= self.few else F.linear(flat, self.unpacked())
        # `float()` costs half of `to(float32)` in dispatch.
        out = out.float() if x.dtype == torch.float32 else out.to(x.dtype)
        out = out.view(x.shape[:-1] + out.shape[-1:])
        return out if bias is None else out + bias

    def few_rows(self, flat: Tensor) -> Tensor:
        """Multiply bfloat16 [M, K] -> [M, N] with the packed bits, for M up to `few`."""
        raise NotImplementedError

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Look rows up: index [...] -> [..., K]."""
        return self.quantized().rows(index).to(dtype)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.buffers())

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedWeight:
        """Move the buffers, but keep their dtypes: `model.float()` changes nothing."""
        for name, tensor in self._buffers.items():
            if tensor is not None:
                moved = fn(tensor)
                same = moved.dtype == tensor.dtype
                self._buffers[name] = moved if same else tensor.to(moved.device)
        return self


class PortableWeight(PackedWeight):
    """A weight in the portable form of its format, as in a file."""

    codes: Tensor
    scale: Tensor

    def __init__(self, quantized: QuantizedTensor):
        super().__init__(quantized)
        self._store(**quantized.packed())

    @classmethod
    def from_packed(cls, format: NumberFormat, shape: Shape, packed: Tensors) -> PortableWeight:
        weight = cls.__new__(cls)
        nn.Module.__init__(weight)
        weight.format, weight.shape = format, tuple(shape)
        weight._store(**packed)
        return weight

    def packed(self) -> dict[str, Tensor]:
        return dict(self.named_buffers())

    def quantized(self) -> QuantizedTensor:
        return QuantizedTensor.from_packed(self.format, self.shape, self.packed())

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        parts = pick_rows(self.format, self.packed(), index.reshape(-1))
        shape = (index.numel(), self.shape[-1])
        chosen = QuantizedTensor.from_packed(self.format, shape, parts)
        return chosen.dequantize(dtype).view(*index.shape, -1)


class Plain(PortableWeight):
    """Dequantize on each call, then multiply; the reference for all packed kernels.

    The product has the dtype of the activations. For bf16 and fp16 weights, it has the
    dtype of the weights.
    """

    fast = False

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.format.kind == "float":
            out = F.linear(x.to(self.codes.dtype), self.codes).to(x.dtype)
        else:
            out = F.linear(x, self.quantized().dequantize(x.dtype))
        return out if bias is None else out + bias
