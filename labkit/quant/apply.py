"""Quantize a whole model of labkit or transformers in place, part by part.

    report = quantize_model(model, "int4")                          # round to nearest
    report = quantize_model(model, "int4_g64_zp", "gptq+clip", calibration)
    print(report)        # every parameter, its format, its bits; the share quantized

The request is checked completely before anything changes. Then the model is calibrated,
AWQ's scales are folded in, and layers are replaced one by one. Each layer's
full-precision weight is released before the next layer is packed. Calibrated methods
apply to the blocks. Head and embedding are rounded to nearest, because 8 bits lose
nothing there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from labkit.errors import BadRequest
from labkit.formats import get_format, torch_dtype
from labkit.quant.awq import Fold, awq
from labkit.quant.calibrate import Calibration, InputStatistics, collect
from labkit.quant.inventory import Part, QuantizationReport, check_weights, parameter_nbytes, survey
from labkit.quant.layer_by_layer import Replay
from labkit.quant.linear import install
from labkit.quant.methods import Method, quantize, round_trip
from labkit.quant.recipe import Recipe
from labkit.quant.w8a8 import W8A8Weight

Statistics = dict[str, InputStatistics]
Text = Calibration | Mapping[str, InputStatistics] | None


def predict(model: nn.Module, recipe: str | Recipe, kernel: str = "auto") -> QuantizationReport:
    """Return the report of quantize_model without changing the model."""
    recipe = Recipe.named(recipe)
    parts = tuple(survey(model, recipe, kernel))
    return QuantizationReport(recipe, recipe.method, parts, parameter_nbytes(model))


def quantize_model(
    model: nn.Module,
    recipe: str | Recipe,
    method: str | Method | None = None,
    calibration: Text = None,
    *,
    folds: Sequence[Fold] = (),
    kernel: str = "auto",
    progress: Callable[[str], None] = lambda line: None,
) -> QuantizationReport:
    """Quantize `model` in place by `recipe` and return a report on every parameter.

    Args:
        method: rtn, clip, gptq, awq or several joined by +; the recipe's own if None.
        calibration: text, or the result of `calibrate.collect` for this same model, so
            that several methods can share one pass. Text with `blocks` calibrates layer
            by layer.
        folds: the operations into which AWQ folds its scales
            (`labkit.model.folding.fold_map`).
        kernel: "auto", or "plain" for the reference.
        progress: called with one line per step.

    Raises BadRequest for a request that is not valid, before the model changes.
    """
    recipe = Recipe.named(recipe)
    method = method if isinstance(method, Method) else Method(method or recipe.method)
    check_weights(model)
    if recipe.only_casts:
        return _cast(model, recipe, method)
    report = predict(model, recipe, kernel)
    report.check_share()
    _check_method(method, report, calibration, folds)
    formats = {p.name: get_format(p.format) for p in report.parts if p.calibrated}
    alphas: dict[str, float] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stages = _stages(model, report.parts, folds, method, calibration)
        for parts, stage_folds, statistics in stages:
            if "awq" in method.parts and stage_folds:
                progress(f"searching AWQ scales from {stage_folds[0].linears[0]}")
                encode = lambda n, w, s: round_trip(w, formats[n], method, s)  # noqa: E731
                alphas |= awq(model, stage_folds, statistics, encode)
            for part in parts:
                if part.quantized:
                    progress(part.name)
                    _replace(model, part, method, statistics.pop(part.name, None), kernel, recipe)
    notes = [str(w.message) for w in caught if str(w.message).startswith("GPTQ:")]
    for w in caught:
        warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
    if "awq" in method.parts:
        low, high = min(alphas.values(), default=0), max(alphas.values(), default=0)
        notes.insert(0, f"AWQ folded {len(alphas)} scales, alpha {low:.1f} to {high:.1f}")
    return replace(report, method=method.name, notes=tuple(notes))


def _stages(
    model: nn.Module,
    parts: Sequence[Part],
    folds: Sequence[Fold],
    method: Method,
    calibration: Text,
) -> Iterator[tuple[Sequence[Part], Sequence[Fold], Statistics]]:
    """Yield (parts, folds, statistics) once, or once per block.

    The caller replaces the parts of one stage before it asks for the next one, so each
    block is calibrated on the quantized blocks before it.
    """
    if method.name == "rtn" or calibration is None:
        yield parts, folds, {}
    elif isinstance(calibration, Mapping):
        yield parts, folds, dict(calibration)
    elif not calibration.blocks:
        names = [part.name for part in parts if part.calibrated]
        yield parts, folds, collect(model, names, calibration)
    else:
        replay = Replay(model, calibration)
        names_of = {module: name for name, module in model.named_modules()}
        for index, block in enumerate(replay.blocks):
            inside = [p for p in parts if p.name.startswith(f"{names_of[block]}.")]
            parts = [p for p in parts if p not in inside]
            names = [p.name for p in inside if p.calibrated]
            own = [fold for fold in folds if set(fold.linears) <= set(names)]
            forward = replay.forward(index)
            yield inside, own, collect(model, names, calibration, forward) if names else {}
            replay.advance(index)
        yield parts, (), {}


def _check_method(
    method: Method, report: QuantizationReport, calibration: Text, folds: Sequence[Fold]
) -> None:
    """Raise BadRequest if the method lacks integer formats, folds, text or statistics."""
    if method.name == "rtn":
        return
    recipe, needs = report.recipe.name, f"Method {method.name} needs"
    calibrated = [part for part in report.parts if part.calibrated]
    if not calibrated:
        text = f"integer formats in the blocks, and recipe {recipe} has none"
        raise BadRequest(f"{needs} {text}; use method 'rtn'.")
    if "awq" in method.parts and not folds:
        raise BadRequest(f"{needs} a map of preceding layers; give folds=fold_map(model).")
    if not calibration and method.needs_text:
        raise BadRequest(f"{needs} calibration text; give a Calibration, or use method 'rtn'.")
    statistics = calibration if isinstance(calibration, Mapping) else {}
    for part in calibrated if statistics else ():
        size = len(statistics[part.name].hessian) if part.name in statistics else "no"
        if size != part.shape[1]:
            sizes = f"{part.shape[1]} inputs, and its statistics are for {size} inputs"
            raise BadRequest(f"{part.name} has {sizes}; collect them from this model.")


def _replace(
    model: nn.Module,
    part: Part,
    method: Method,
    statistics: InputStatistics | None,
    kernel: str,
    recipe: Recipe,
) -> None:
    """Replace the layer of one parameter by a quantized layer."""
    if part.owner:  # the owner was replaced earlier
        owner: Any = model.get_submodule(part.owner)
        return install(model, part.name, owner.weight, kernel)
    name = part.name if part.kind == "experts" else f"{part.name}.weight"
    weight = model.get_parameter(name).detach()
    weight = weight.T if part.kind == "conv1d" else weight
    clip = part.calibrated and "clip" in method.parts
    how = method if clip or statistics is not None else "rtn"
    quantized = quantize(weight, part.format, statistics, how, part.name)
    w8a8 = recipe.activations and part.calibrated and part.format == "int8_channel"
    install(model, part.name, W8A8Weight(quantized) if w8a8 else quantized, kernel)


def _cast(model: nn.Module, recipe: Recipe, method: Method) -> QuantizationReport:
    """Cast the whole model to a float dtype without replacing its layers."""
    if method.name != "rtn":
        text = f"Method {method.name} needs integer formats, and recipe {recipe.name} has none"
        raise BadRequest(f"{text}; use method 'rtn'.")
    original, dtype = parameter_nbytes(model), torch_dtype(get_format(recipe.blocks).name)
    for name, parameter in model.named_parameters():
        largest = float(parameter.abs().max())
        if largest > torch.finfo(dtype).max:
            text = f"{name} contains a weight of {largest:.3g}, too large for {recipe.blocks}"
            raise BadRequest(f"{text}; use bf16.")
    parts = []
    for name, p in model.to(dtype).named_parameters():
        kind, place = ("linear", "blocks") if p.ndim > 1 else ("kept", "other")
        parts.append(Part(name, kind, place, tuple(p.shape), recipe.blocks, p.nbytes))
    return QuantizationReport(recipe, "rtn", tuple(parts), original)
