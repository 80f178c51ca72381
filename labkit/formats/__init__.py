"""Number formats as data, and tensors stored in them.

`names` and `recipes` describe formats and need no torch. Code that needs torch is
imported on first use.

    get_format("int4_g64_zp").bits_per_weight((1536, 576))   # 4.3125, all-in
    quantized = quantize(weight, "int4_g64_zp")               # a QuantizedTensor
    dequantize(quantized)                                     # back to float32
"""

from importlib import import_module
from typing import TYPE_CHECKING

from labkit.formats.names import (
    DTYPES,
    GRAMMAR,
    KNOWN_FORMATS,
    NumberFormat,
    get_format,
    is_format,
    torch_dtype,
)
from labkit.formats.recipes import RECIPES, RecipeFormats, get_recipe

if TYPE_CHECKING:
    from labkit.formats.packing import pack, unpack
    from labkit.formats.tensor import QuantizedTensor, dequantize, quantize

__all__ = ["DTYPES", "GRAMMAR", "KNOWN_FORMATS", "RECIPES", "NumberFormat", "QuantizedTensor"]
__all__ += ["RecipeFormats", "dequantize", "get_format", "get_recipe", "is_format", "pack"]
__all__ += ["quantize", "torch_dtype", "unpack"]

_LAZY = {"pack": "packing", "unpack": "packing"}
_LAZY |= {"QuantizedTensor": "tensor", "dequantize": "tensor", "quantize": "tensor"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"labkit.formats.{_LAZY[name]}"), name)
