"""Quantize a loaded model, as `labkit quantize` and `labkit eval` do."""

from __future__ import annotations

from labkit.lab.texts.calibration import library_calibration
from labkit.model.decoder import Decoder
from labkit.model.folding import fold_map
from labkit.quant import quantize_model
from labkit.quant.calibrate import SEQUENCES
from labkit.quant.inventory import QuantizationReport
from labkit.quant.methods import Method
from labkit.quant.recipe import Recipe


def quantize_in_place(
    model: Decoder,
    recipe: Recipe,
    method: str | None = None,
    *,
    seed: int = 0,
    sequences: int | None = None,
    layer_by_layer: bool = False,
    **options,
) -> QuantizationReport:
    """Quantize `model` by a recipe and return the report.

    `method` None means the recipe's own. `seed` chooses the calibration text from
    Python's standard library. `sequences` is the number of calibration sequences.
    `options` (kernel, progress) are passed to `quantize_model`.

    `layer_by_layer` calibrates each layer on the output of the quantized layers before
    it. It reads the text three times and may help at 3 bits. On the default model
    at 3 bits it lowered the KL of AWQ + GPTQ by 7 % on code and 5 % on prose (mean of
    three calibration texts; with one of them KL grew).
    """
    parts = Method(name=method or recipe.method)
    calibration = None
    if parts.calibrated:
        count = sequences or SEQUENCES
        calibration = library_calibration(model.tokenizer, sequences=count, seed=seed)
        calibration.blocks = model.layers if layer_by_layer else ()
    folds = fold_map(model) if "awq" in parts.parts else ()
    return quantize_model(model, recipe, parts, calibration, folds=folds, **options)
