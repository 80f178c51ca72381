"""Describe number formats, and store tensors in them.

    get_format("int4_g64_zp").bits_per_weight((1536, 576))   # 4.3125, scales included
    quantized = round_to_nearest(weight, "int4_g64_zp")               # a QuantizedTensor
    dequantize(quantized)                                     # back to float32

`names` and `recipes` describe formats without torch. Modules that need torch are
imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from labkit.formats.names import DTYPES, NumberFormat, get_format, torch_dtype
from labkit.formats.recipes import RECIPES, RecipeFormats, get_recipe

if TYPE_CHECKING:
    from labkit.formats.packing import pack, unpack
    from labkit.formats.tensor import QuantizedTensor, dequantize, round_to_nearest

__all__ = ["DTYPES", "RECIPES", "NumberFormat", "QuantizedTensor", "RecipeFormats", "dequantize"]
__all__ += ["get_format", "get_recipe", "pack", "round_to_nearest", "torch_dtype", "unpack"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "packing" if name in ("pack", "unpack") else "tensor"
    return getattr(import_module(f"labkit.formats.{module}"), name)
