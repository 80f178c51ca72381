"""quantize_model: a whole model, of labkit or transformers, part by part, in place.

    report = quantize_model(model, "int4")                                       # round to nearest
    report = quantize_model(model, "int4_g64_zp", "awq+gptq+clip", calibration, folds=fold_map(model))
    print(report)          # every parameter, its format, its bits; the share quantised

Everything that can be refused is refused first (survey). Then: calibrate, fold AWQ's scales, and replace layer by layer,
so that a layer's full-precision weight is released before the next one is packed.
Calibrated methods apply to the blocks; head and embedding are rounded to nearest (8 bits lose nothing there).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from labkit.errors import BadRequest
from labkit.formats import get_format
from labkit.formats.tensor import QuantizedTensor
from labkit.formats.tensor import quantize as round_to_nearest
from labkit.kernels.packed import Plain
from labkit.quant.awq import Fold, awq
from labkit.quant.calibrate import Calibration, InputStatistics, collect
from labkit.quant.linear import QuantizedEmbedding, QuantizedLinear
from labkit.quant.methods import Method, quantize_weight, round_trip
from labkit.quant.recipe import Recipe
from labkit.quant.report import QuantizationReport, parameter_nbytes
from labkit.quant.sequential import Replay
from labkit.quant.survey import Part, check_survey, check_weights, survey
from labkit.quant.w8a8 import W8A8Weight

LEAST_SHARE = 0.9


def predict(model: nn.Module, recipe: str | Recipe, kernel: str = "auto") -> QuantizationReport:
    """The report of quantize_model, before anything is done."""
    recipe = Recipe.named(recipe)
    return QuantizationReport(recipe, recipe.method, tuple(survey(model, recipe, kernel)), parameter_nbytes(model))


def quantize_model(
    model: nn.Module,
    recipe: str | Recipe,
    method: str | Method | None = None,
    calibration: Calibration | None = None,
    *,
    folds: Sequence[Fold] = (),
    kernel: str = "auto",
    least_share: float = LEAST_SHARE,
    forward: Callable | None = None,
    statistics: Mapping[str, InputStatistics] | None = None,
    blocks: Sequence[nn.Module] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> QuantizationReport:
    """Quantise `model` in place by `recipe` (its own method unless one is given) and report on every parameter.

    `folds`: where AWQ may put its scales (`labkit.model.folding.fold_map`). `kernel`: "auto" or "plain" (the reference).
    `statistics`: what `calibrate.collect` found for this very model, in place of a calibration, to try several methods.
    `blocks`: the model's blocks in order (`model.layers`): calibrate layer by layer (labkit.quant.sequential).
    """
    recipe = Recipe.named(recipe)
    method = method if isinstance(method, Method) else Method(method or recipe.method)
    original = parameter_nbytes(model)
    check_weights(model)
    if only_casts(recipe):
        if method.name != "rtn":
            raise BadRequest(f"Method {method.name} chooses integer codes, and recipe {recipe.name} has none; leave the method out.")
        return _cast(model, recipe, original)
    parts = survey(model, recipe, kernel)
    check_survey(parts, least_share)
    calibrated = [
        p
        for p in parts
        if p.kind in ("linear", "conv1d") and p.part == "blocks" and get_format(p.format).kind == "integer"
    ]
    if method.name != "rtn" and not calibrated:
        raise BadRequest(
            f"Method {method.name} chooses integer codes, and no linear layer of recipe {recipe.name} has them; use method 'rtn'."
        )
    if "awq" in method.parts and not folds:
        raise BadRequest(
            "AWQ folds scales into what precedes each layer and no map was given; pass folds=fold_map(model), or use gptq or clip."
        )
    if {"awq", "gptq"} & set(method.parts) and calibration is None and not statistics:
        raise BadRequest(
            f"Method {method.name} needs calibration text and none was given; pass a Calibration, or use method 'rtn'."
        )
    statistics = {} if method.name == "rtn" or not statistics else dict(statistics)
    check_statistics(statistics, calibrated)
    layerwise = bool(blocks) and calibration is not None and method.name != "rtn" and not statistics
    if calibration is not None and method.name != "rtn" and not statistics and not layerwise:
        progress(f"calibrating on {calibration.tokens} tokens")
        statistics = collect(model, [p.name for p in calibrated], calibration, forward)
    formats, alphas = {p.name: get_format(p.format) for p in calibrated}, {}

    def finish(chosen: Sequence[Part], chosen_folds: Sequence[Fold], seen: dict[str, InputStatistics]) -> None:
        """Fold, then replace, some parts of the model."""
        if "awq" in method.parts and chosen_folds:
            progress(f"searching AWQ scales from {chosen_folds[0].linears[0]}")
            alphas.update(awq(model, list(chosen_folds), seen, lambda n, w, s: round_trip(w, formats[n], method, s)))
        for part in chosen:
            if part.kind != "kept":
                progress(part.name)
                _replace(model, part, method, seen.pop(part.name, None), kernel, recipe)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        left = parts
        if layerwise:
            progress(f"calibrating layer by layer on {calibration.tokens} tokens")
            replay, place = Replay(model, blocks, calibration, forward), {m: n for n, m in model.named_modules()}
            for index, block in enumerate(blocks):
                inside = [p for p in left if p.name.startswith(f"{place[block]}.")]
                left = [p for p in left if p not in inside]
                names = [p.name for p in inside if p.name in formats]
                own = [f for f in folds if set(f.linears) <= set(names)]
                finish(inside, own, collect(model, names, calibration, replay.forward(index)) if names else {})
                replay.advance(index)
        finish(left, () if layerwise else folds, statistics)
    notes = []
    if "awq" in method.parts:
        low, high = min(alphas.values(), default=0), max(alphas.values(), default=0)
        notes.append(f"AWQ folded {len(alphas)} scales, alpha {low:.1f} to {high:.1f}")
    for message in said:
        warnings.warn_explicit(message.message, message.category, message.filename, message.lineno)
        if str(message.message).startswith("GPTQ:"):
            notes.append(str(message.message))
    return QuantizationReport(recipe, method.name, tuple(parts), original, tuple(notes))


def only_casts(recipe: Recipe) -> bool:
    """The same floats in every part: the layers stay what they are."""
    formats = {recipe.blocks, recipe.head, recipe.embedding}
    plain = len(formats) == 1 and recipe.blocks in ("bf16", "fp16", "fp32")
    return plain and not recipe.overrides and not recipe.first_layers.count and not recipe.last_layers.count


def check_statistics(statistics: Mapping[str, InputStatistics], parts: Sequence[Part]) -> None:
    """Refuse what was collected for another model; without any, there is nothing to check."""
    for part in parts if statistics else ():
        seen, length = statistics.get(part.name), part.shape[1]
        if seen is None or seen.hessian.shape != (length, length):
            found = "none" if seen is None else f"those of {len(seen.hessian)}"
            raise BadRequest(
                f"{part.name} reads {length} inputs and the statistics hold {found} for it; collect them from this very model."
            )


def _replace(model, part: Part, method: Method, statistics, kernel: str, recipe: Recipe) -> None:
    """One parameter's holder, replaced by its quantised kind."""
    if part.kind == "experts":
        owner, _, name = part.name.rpartition(".")
        hold_parameter(
            model.get_submodule(owner), name, round_to_nearest(model.get_parameter(part.name).detach(), part.format)
        )
        return
    module = model.get_submodule(part.name)
    weight = (module.weight.T if part.kind == "conv1d" else module.weight).detach()
    if part.owner:  # replaced before this one
        result = model.get_submodule(part.owner).weight
    elif part.part == "blocks" and (statistics is not None or "clip" in method.parts):
        result = quantize_weight(weight, get_format(part.format), method, statistics, part.name)
    else:
        result = round_to_nearest(weight, part.format)
    if isinstance(module, nn.Embedding):
        new = QuantizedEmbedding(result, module.weight.dtype, kernel, float(getattr(module, "embed_scale", 1.0)))
    else:
        if recipe.activations and part.part == "blocks" and part.format == "int8_channel":
            result = W8A8Weight(result)
        new = QuantizedLinear(result, module.bias, kernel)
    parent, _, name = part.name.rpartition(".")
    setattr(model.get_submodule(parent), name, new.train(module.training))


def hold_parameter(module: nn.Module, name: str, held: QuantizedTensor) -> None:
    """Replace a bare parameter (fused experts) by packed bits; reading it unpacks it, each time."""
    dtype = getattr(module, name).dtype
    delattr(module, name)
    module.add_module(f"{name}_packed", Plain(held))
    read = property(lambda self: getattr(self, f"{name}_packed").quantized().dequantize(dtype))
    module.__class__ = type(type(module).__name__, (type(module),), {name: read})


def _cast(model: nn.Module, recipe: Recipe, original: int) -> QuantizationReport:
    """bf16, fp16, fp32: the whole model in a dtype; its layers stay what they are."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[recipe.blocks]
    for name, parameter in model.named_parameters():
        if float(parameter.abs().max()) > torch.finfo(dtype).max:
            raise BadRequest(
                f"{name} holds a weight of {float(parameter.abs().max()):.3g}, too large for {recipe.blocks}; take bf16."
            )
    model.to(dtype)
    parts = [
        Part(
            name,
            "linear" if p.ndim > 1 else "kept",
            "blocks" if p.ndim > 1 else "other",
            tuple(p.shape),
            recipe.blocks,
            p.numel() * p.element_size(),
        )
        for name, p in model.named_parameters()
    ]
    return QuantizationReport(recipe, "rtn", tuple(parts), original)
