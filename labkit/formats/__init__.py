"""Number formats as data, and the tensors held in them.

`names` and `recipes` describe and need no torch; `integer`, `floats`, `packing` and `tensor` touch tensors and are
imported by the functions below only when they are called.

    get_format("int4_g64_zp").bits_per_weight((1536, 576))   # 4.3125, all-in
    held = quantize(weight, "int4_g64_zp")                     # a QuantizedTensor: packed codes, scales, zero points
    dequantize(held)                                           # back to float32
"""

from labkit.formats.names import GRAMMAR, KNOWN_FORMATS, NumberFormat, get_format, is_format
from labkit.formats.recipes import RECIPES, RecipeFormats, get_recipe

__all__ = [
    "GRAMMAR", "KNOWN_FORMATS", "NumberFormat", "RECIPES", "RecipeFormats",
    "dequantize", "get_format", "get_recipe", "is_format", "pack", "quantize", "unpack",
]  # fmt: skip


def quantize(weight, format):
    """Round a tensor [..., K] to the nearest values of `format` -> QuantizedTensor (packed)."""
    from labkit.formats.tensor import quantize as run

    return run(weight, format)


def dequantize(quantized, dtype=None):
    """The numbers a QuantizedTensor stands for, [..., K], float32 unless asked."""
    return quantized.dequantize(dtype)


def pack(codes, bits):
    """Integer codes [R, K] -> bytes [R, ceil(K*bits/8)]; code i takes bits i*bits .. of the row, lowest bit first."""
    from labkit.formats.packing import pack as run

    return run(codes, bits)


def unpack(packed, bits, length, signed=False):
    """The inverse of `pack`; `signed` reads two's complement, so that nibble 8 is -8."""
    from labkit.formats.packing import unpack as run

    return run(packed, bits, length, signed)
