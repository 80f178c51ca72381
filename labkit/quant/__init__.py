"""Weights in fewer bits: methods, recipes, and a walk that quantises any torch model in place.

    from labkit.quant import quantize_model
    report = quantize_model(model, "int4")

`rtn` and `clip` need no data; `gptq` and `awq` read calibration text. Knows no model: what precedes what is handed in.
"""

from __future__ import annotations

import importlib

_NAMES = {
    "Calibration": "calibrate", "Fold": "awq", "InputStatistics": "calibrate", "Method": "methods",
    "QuantizationReport": "walk", "QuantizedEmbedding": "linear", "QuantizedLinear": "linear", "QuantizedTensor": "linear",
    "Recipe": "recipe", "collect": "calibrate", "gptq": "gptq", "load": "checkpoint", "predict": "walk",
    "quantize": "linear", "quantize_model": "walk", "save": "checkpoint", "search": "recipe", "search_clip": "clip",
}  # fmt: skip
__all__ = sorted(_NAMES)


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module 'labkit.quant' has no attribute {name!r}")
    return getattr(importlib.import_module(f"labkit.quant.{_NAMES[name]}"), name)
