"""Number formats as data: what a name means, and what it costs, all-in. No torch here.

A format says how many bits a code has, which weights share a scale, and how a code becomes a number:

    symmetric        w = scale * code                      code is signed, two's complement
    zero point  zp   w = scale * (code - zero_point)       code and zero point unsigned, both `bits` wide
    minimum    min   w = scale * code + minimum            code unsigned, minimum a float (as GGUF's Q4_1)
    middle     mid   w = scale * (code - 2^(bits-1)) + middle   the same, offset held where PyTorch's kernels want it

Names say everything: `int{bits}_{channel|token|tensor|g<N>}[_zp|_min|_mid|_sym]`, and `fp32`, `fp16`, `bf16`,
`fp8_e4m3`, `nvfp4`. Groups run along the last axis (a linear layer's inputs); where the group does not divide it,
the last group is short: ceil(inputs / group) groups, and no padding is stored.

Bits a weight are all-in: codes rounded up to whole bytes a row, scales, zero points and minima. A bare "4 bits" hides
up to 25 % (int4_g32_min is 5.0). Group scales are float16; a channel's is bfloat16, which is what packed kernels read (codes are
chosen for the scale as stored, so nothing is lost); scales of tokens and tensors are float32.
"""

import math
import re
from dataclasses import dataclass
from functools import cache

from labkit.errors import BadRequest

GRAMMAR = (
    "int{2..8}_{channel|token|tensor|g<N>}[_zp|_min|_mid|_sym] (as in int8_channel, int4_g64_zp, int4_g32_min), "
    "fp32, fp16, bf16, fp8_e4m3 or nvfp4"
)

# Those that tables, tests and benchmarks walk through; every other name of the grammar works as well.
KNOWN_FORMATS = (
    "fp32", "fp16", "bf16", "fp8_e4m3", "nvfp4",
    "int8_channel", "int8_token", "int8_tensor", "int8_g32_sym",
    "int4_channel", "int4_g32_sym", "int4_g32_zp", "int4_g32_min", "int4_g64_zp", "int4_g128_zp",
    "int3_channel", "int3_g64_zp", "int2_g32_zp",
)  # fmt: skip

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1}


@dataclass(frozen=True)
class NumberFormat:
    """One number format. `group_size` weights of the last axis share a scale; None means `sharing` decides."""

    name: str
    kind: str  # "integer" | "float" (the dtype itself) | "scaled_float" (fp8, nvfp4)
    bits: int
    sharing: str = "none"  # what shares one scale: "none" | "tensor" | "row" (channel, token) | "group"
    group_size: int | None = None
    scale_dtype: str | None = None
    offset: str | None = None  # None (symmetric) | "zero_point" | "minimum" | "middle"
    tensor_scale: bool = False  # one more float32 for the whole tensor (NVFP4)

    @property
    def code_range(self) -> tuple[int, int]:
        """Lowest and highest integer code."""
        if self.kind != "integer":
            raise BadRequest(
                f"{self.name} is a floating-point format and has no integer code range; ask `bits` instead."
            )
        if self.offset is None:
            return -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        return 0, (1 << self.bits) - 1

    @property
    def symmetric(self) -> bool:
        return self.offset is None

    def groups(self, length: int) -> int:
        """How many scales a row of `length` weights has. Ceil: a short last group still needs its own."""
        if self.sharing == "group":
            return math.ceil(length / self.group_size)
        return {"none": 0, "tensor": 0, "row": 1}[self.sharing]

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of `shape` in this format: codes, scales, offsets. Equal to the stored tensors' bytes."""
        rows, length = math.prod(shape[:-1]), shape[-1]
        total = rows * math.ceil(length * self.bits / 8)
        scales = 1 if self.sharing == "tensor" else rows * self.groups(length)
        if self.scale_dtype is not None:
            total += scales * DTYPE_BYTES[self.scale_dtype]
        if self.offset in ("minimum", "middle"):
            total += scales * DTYPE_BYTES[self.scale_dtype]
        elif self.offset == "zero_point":  # packed like codes, a whole number of bytes a row
            per_row = 1 if self.sharing == "tensor" else self.groups(length)
            total += (1 if self.sharing == "tensor" else rows) * math.ceil(per_row * self.bits / 8)
        return total + (4 if self.tensor_scale else 0)

    def bits_per_weight(self, shape: tuple[int, ...] | None = None) -> float:
        """All-in bits a weight. Without a shape: the limit for long rows (int4_g128_zp 4.15625, nvfp4 4.5)."""
        if shape is not None:
            return 8 * self.nbytes(shape) / math.prod(shape)
        if self.sharing != "group":
            return float(self.bits)
        scale = 8 * DTYPE_BYTES[self.scale_dtype]
        offset = {None: 0, "zero_point": self.bits, "minimum": scale, "middle": scale}[self.offset]
        return self.bits + (scale + offset) / self.group_size

    def __str__(self) -> str:
        return self.name


_FLOATS = {
    "fp32": NumberFormat("fp32", "float", 32),
    "fp16": NumberFormat("fp16", "float", 16),
    "bf16": NumberFormat("bf16", "float", 16),
    "fp8_e4m3": NumberFormat("fp8_e4m3", "scaled_float", 8, "row", None, "fp32"),
    "nvfp4": NumberFormat("nvfp4", "scaled_float", 4, "group", 16, "fp8_e4m3", tensor_scale=True),
}
_INTEGER = re.compile(r"int([2-8])_(channel|token|tensor|g([1-9]\d*))(?:_(zp|min|mid|sym))?")
LARGEST_GROUP = 65_536  # a short row is padded to one whole group, so a misprint would ask for terabytes
_OFFSETS = {None: None, "sym": None, "zp": "zero_point", "min": "minimum", "mid": "middle"}


@cache
def _parse(name: str) -> NumberFormat:
    if name in _FLOATS:
        return _FLOATS[name]
    match = _INTEGER.fullmatch(name)
    if match is None:
        raise BadRequest(f"There is no number format {name!r}; a format is {GRAMMAR}.")
    bits, sharing, group, suffix = int(match[1]), match[2], match[3], match[4]
    offset = _OFFSETS[suffix]
    if group and int(group) > LARGEST_GROUP:
        raise BadRequest(
            f"Format {name!r} has groups of {group} weights; give 1 to {LARGEST_GROUP}, or {name.replace(f'g{group}', 'channel')} for a whole row."
        )
    if group:
        # A middle exists for PyTorch's packed kernels, which read bfloat16 scales (fast) and nothing else.
        canonical = f"int{bits}_g{group}_{suffix or 'sym'}"
        dtype = "bf16" if suffix == "mid" else "fp16"
        return NumberFormat(canonical, "integer", bits, "group", int(group), dtype, offset)
    canonical = f"int{bits}_{sharing}" + (f"_{suffix}" if offset else "")
    dtype = "bf16" if sharing == "channel" else "fp32"
    return NumberFormat(canonical, "integer", bits, "tensor" if sharing == "tensor" else "row", None, dtype, offset)


def get_format(name: "str | NumberFormat") -> NumberFormat:
    """The format of that name. Raises BadRequest with the grammar for an unknown one."""
    return name if isinstance(name, NumberFormat) else _parse(str(name))


def is_format(name: str) -> bool:
    try:
        get_format(name)
    except BadRequest:
        return False
    return True
