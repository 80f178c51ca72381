"""Weights in fewer bits: methods, recipes, and a walk over any torch model.

    from labkit.quant import quantize_model
    report = quantize_model(model, "int4")

Methods `rtn` and `clip` need no data; `gptq` and `awq` read calibration text. This
package knows no model architecture: callers pass which operation precedes which layers.
"""

from __future__ import annotations

import importlib

_NAMES = {
    "Calibration": "calibrate",
    "GPTQOptions": "gptq",
    "Method": "methods",
    "QuantizationReport": "inventory",
    "QuantizedLinear": "linear",
    "Recipe": "recipe",
    "collect": "calibrate",
    "gptq": "gptq",
    "predict": "apply",
    "quantize": "methods",
    "quantize_model": "apply",
    "search": "recipe",
    "unpack_model": "linear",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module 'labkit.quant' has no attribute {name!r}")
    return getattr(importlib.import_module(f"labkit.quant.{_NAMES[name]}"), name)
