"""`labkit quantize`: store a model in fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from labkit.errors import BadRequest
from labkit.lab.cli import answer as cli
from labkit.lab.cli.answer import Json, Method, Model, Threads

LAYER_BY_LAYER = "Calibrate each layer on the quantized ones before it."


def quantize(
    output: Annotated[Path, Argument(help="The folder to write.")],
    recipe: Annotated[str, Option(help="int8, int4, a format or a YAML file.")] = "int4",
    method: Method = None,
    model: Model = "default",
    calibration: Annotated[int | None, Option(min=1, help="Calibration sequences.")] = None,
    seed: Annotated[int, Option(help="Chooses the calibration text.")] = 0,
    layer_by_layer: Annotated[bool, Option("--layer-by-layer", help=LAYER_BY_LAYER)] = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Quantize a model and write it as a folder that loads without the original.

    \b
    Example:  labkit quantize small --recipe int4
              labkit quantize small --recipe int4_g64_zp --method gptq
    Then:     labkit generate --model small --prompt "Why is the sea salty?"
    """
    from labkit.lab.stack.open import load_model
    from labkit.lab.stack.quantize import quantize_in_place
    from labkit.model.files.quantized import check_folder, save_quantized
    from labkit.quant import predict
    from labkit.quant.methods import Method as Parts
    from labkit.quant.recipe import Recipe

    chosen = Recipe.named(recipe)
    parts = Parts(name=method or chosen.method)
    if layer_by_layer and not parts.calibrated:
        raise BadRequest(f"Method {parts.name} has no --layer-by-layer; add --method gptq")
    if chosen.only_casts:
        fix = "give int8, int4, an integer format, or a YAML file"
        raise BadRequest(f"Recipe {recipe} only casts, so there is nothing to pack; {fix}")
    check_folder(output)
    cli.use_threads(threads)
    loaded = load_model(model)
    if loaded.tokenizer is None and parts.calibrated:
        raise BadRequest(f"Model {model!r} has no tokenizer; give a folder that has one")
    check_folder(output, predict(loaded, chosen).nbytes)
    options = {"seed": seed, "sequences": calibration, "layer_by_layer": layer_by_layer}
    report = quantize_in_place(loaded, chosen, method, progress=cli.Steps(), **options)
    if report.nbytes > report.original_nbytes:
        larger = f"The result has {report.nbytes:,} B, the original {report.original_nbytes:,} B"
        cli.say(f"{larger}; give head and embedding one format, so that they stay shared.")
    size = save_quantized(loaded, output, report)
    result = {"ok": True, "file": output, "file_bytes": size, "method": report.method}
    result |= {"weight_bytes": report.nbytes, "original_bytes": report.original_nbytes}
    result["bits_per_weight"] = report.bits_per_weight
    cli.answer(result, as_json, f"{report}\nwrote {output}: {size:,} B")
