"""Quantize weights: methods, recipes, and a walk over any torch model.

    from labkit.quant import quantize_model
    report = quantize_model(model, "int4")

Methods `rtn` and `clip` need no data; `gptq` and `awq` need calibration text. This
package knows no model architecture: for AWQ, the caller says which operation precedes
which layers.
"""

from __future__ import annotations

import importlib

_MODULES = {
    "apply": "predict quantize_model",
    "calibrate": "Calibration collect",
    "inventory": "QuantizationReport",
    "linear": "QuantizedLinear unpack_model",
    "methods": "Method quantize",
    "recipe": "Recipe search",
}
_NAMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_NAMES)


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module 'labkit.quant' has no attribute {name!r}")
    return getattr(importlib.import_module(f"labkit.quant.{_NAMES[name]}"), name)
