"""Describe number formats as data. Needs no torch.

A format says how many bits a code has, which weights share a scale, and how a code
becomes a number:

    symmetric        w = scale * code                      signed code, two's complement
    zero point  zp   w = scale * (code - zero_point)       unsigned code and zero point
    minimum    min   w = scale * code + minimum            unsigned code, as GGUF's Q4_1
    middle     mid   w = scale * (code - 2^(bits-1)) + middle    as PyTorch's INT4 operators

Names are `int{bits}_{channel|token|tensor|g<N>}[_zp|_min|_mid|_sym]`, and `fp32`,
`fp16`, `bf16`, `fp8_e4m3`, `nvfp4`. Groups run along the last axis (the inputs of a
linear layer). If the group size does not divide a row, the last group is short, and no
padding is stored.

Bits per weight include everything that is stored: codes (each row rounded up to whole
bytes), scales, zero points and minima. "4 bits" without these can be 25 % too small
(int4_g32_min takes 5.0). Scales are float16 for groups, bfloat16 for channels (packed
kernels read these), and float32 for tokens and tensors.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from labkit.errors import BadRequest

if TYPE_CHECKING:
    import torch

GRAMMAR = (
    "int{2..8}_{channel|token|tensor|g<N>}[_zp|_min|_mid|_sym] (as in int8_channel, int4_g64_zp, "
    "int4_g32_min), fp32, fp16, bf16, fp8_e4m3 or nvfp4"
)

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # our name: torch's name
DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1}
LARGEST_GROUP = 65_536  # short rows are padded to a whole group, so a typo could need terabytes


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name` here: a key of `DTYPES`, or fp8_e4m3."""
    import torch

    return getattr(torch, DTYPES.get(name, "float8_e4m3fn"))


@dataclass(frozen=True)
class NumberFormat:
    """A number format.

    kind: "integer", "float" (a dtype) or "scaled_float" (fp8_e4m3, nvfp4).
    sharing: which weights share a scale: "none", "tensor", "row" (channel, token) or
        "group".
    offset: None (symmetric), "zero_point", "minimum" or "middle".
    tensor_scale: whether the tensor has another float32 scale (NVFP4).
    """

    name: str
    kind: str
    bits: int
    sharing: str = "none"
    group_size: int | None = None
    scale_dtype: str | None = None
    offset: str | None = None
    tensor_scale: bool = False

    @property
    def code_range(self) -> tuple[int, int]:
        """Lowest and highest code of an integer format."""
        half = 1 << (self.bits - 1)
        return (-half, half - 1) if self.symmetric else (0, 2 * half - 1)

    @property
    def symmetric(self) -> bool:
        return self.offset is None

    def groups(self, length: int) -> int:
        """Number of scales per row of `length` weights; a short last group has one."""
        return math.ceil(length / self.group_size) if self.group_size else 1

    def _scale_nbytes(self, groups: int) -> int:
        """Bytes of the scales and offsets of consecutive groups."""
        scales = groups * DTYPE_BYTES[self.scale_dtype] if self.scale_dtype else 0
        zero_points = math.ceil(groups * self.bits / 8)  # packed like codes
        return scales + {None: 0, "zero_point": zero_points}.get(self.offset, scales)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor [..., K]: codes, scales and offsets, as they are stored."""
        rows, length = math.prod(shape[:-1]), shape[-1]
        lines = 1 if self.sharing == "tensor" else rows
        scales = lines * self._scale_nbytes(self.groups(length))
        return rows * math.ceil(length * self.bits / 8) + scales + 4 * self.tensor_scale

    def bits_per_weight(self, shape: tuple[int, ...] | None = None) -> float:
        """Bits per weight with scales and offsets.

        Without a shape, return the limit for long rows.
        """
        if shape is not None:
            return 8 * self.nbytes(shape) / math.prod(shape)
        # Eight zero points of any size fill whole bytes: the bytes of 8 groups are 8 times
        # the bits of one group divided by 8.
        return self.bits + (self._scale_nbytes(8) / self.group_size if self.group_size else 0.0)

    def __str__(self) -> str:
        return self.name


FLOATS = {name: NumberFormat(name, "float", 8 * DTYPE_BYTES[name]) for name in DTYPES} | {
    "fp8_e4m3": NumberFormat("fp8_e4m3", "scaled_float", 8, "row", None, "fp32"),
    "nvfp4": NumberFormat("nvfp4", "scaled_float", 4, "group", 16, "fp8_e4m3", tensor_scale=True),
}
_INTEGER = re.compile(r"int([2-8])_(channel|token|tensor|g([1-9]\d*))(?:_(zp|min|mid|sym))?")
_SHARING = {"channel": ("row", "bf16"), "token": ("row", "fp32"), "tensor": ("tensor", "fp32")}
_OFFSETS = {None: None, "sym": None, "zp": "zero_point", "min": "minimum", "mid": "middle"}


@cache
def _parse(name: str) -> NumberFormat:
    match = _INTEGER.fullmatch(name)
    if match is None:
        raise BadRequest(f"There is no number format {name!r}; a format is {GRAMMAR}.")
    bits, sharing, group, suffix = match.groups()
    if group and int(group) > LARGEST_GROUP:
        channel = name.replace(sharing, "channel")
        raise BadRequest(
            f"{name} has too long groups; use 1 to {LARGEST_GROUP} weights, or {channel}."
        )
    # PyTorch's packed kernels are fast only with bfloat16 scales, so `mid` has these.
    grouped = ("group", "bf16" if suffix == "mid" else "fp16")
    shared, dtype = _SHARING.get(sharing, grouped)
    offset = _OFFSETS[suffix]
    ending = f"_{suffix}" if offset else "_sym" if group else ""
    size = int(group) if group else None
    name = f"int{bits}_{sharing}{ending}"
    return NumberFormat(name, "integer", int(bits), shared, size, dtype, offset)


def get_format(name: str | NumberFormat) -> NumberFormat:
    """Return the format called `name`. Raises BadRequest for an unknown name."""
    if isinstance(name, NumberFormat):
        return name
    return FLOATS.get(str(name)) or _parse(str(name))


def is_format(name: str) -> bool:
    return name in FLOATS or _INTEGER.fullmatch(name) is not None
