"""Commands about fewer bits: quantize a model and keep it, eval what a recipe costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from labkit.cli.answer import Device, Json, Model, Steps, Threads, answer, say, use_threads
from labkit.errors import BadRequest

TASKS = ("text",)
Method = Annotated[str | None, typer.Option(help="rtn, gptq, awq, clip or joined by +; none: the recipe's own.")]


def quantize(
    output: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    recipe: Annotated[str, typer.Option(help="int8, int4, a number format, or a recipe's YAML file.")] = "int4",
    method: Method = None,
    model: Model = "default",
    calibration: Annotated[
        int, typer.Option(min=1, help="Sequences of calibration text, where a method reads it.")
    ] = 64,
    seed: Annotated[int, typer.Option(help="Which calibration text.")] = 0,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Quantise a model and write it as one file with a readable header.

    \b
    Example:  labkit quantize small.safetensors --recipe int4
              labkit quantize small.safetensors --recipe int4_g64_zp --method gptq
    """
    if output.suffix != ".safetensors":
        raise BadRequest(f"{str(output)!r} is not a .safetensors file; choose such a name for what is written")
    from labkit.quant import predict
    from labkit.quant.checkpoint import predict_file_bytes, save, warn_if_larger
    from labkit.quant.header import check_output
    from labkit.quant.methods import Method as Parts
    from labkit.quant.recipe import Recipe

    chosen = Recipe.named(recipe)
    check_output(output)
    use_threads(threads)
    loaded = _load(model, "cpu", reads_text=Parts(method or chosen.method).calibrated)
    check_output(output, predict_file_bytes(predict(loaded, chosen)))
    source = str(Path(model).resolve()) if Path(model).exists() else loaded.name  # what a reader of the file opens
    report = _quantize(loaded, chosen, method, calibration, seed)
    warn_if_larger(report)
    size = save(loaded, output, about={"model": source, "revision": loaded.revision, "method": report.method})
    result = {"ok": True, "file": output, "file_bytes": size, "weight_bytes": report.nbytes, "method": report.method,
              "original_bytes": report.original_nbytes, "bits_per_weight": report.bits_per_weight}  # fmt: skip
    answer(result, as_json, f"{report}\nwrote {output}: {size:,} B")


def evaluate(
    tasks: Annotated[list[str], typer.Argument(help="What to score: text.")],
    recipe: Annotated[str | None, typer.Option(help="Compare this recipe or format with the model as it is.")] = None,
    method: Method = None,
    kv_format: Annotated[
        str | None, typer.Option(help="Read the text through a KV cache in this format: int8, int4, fp8, int4_prerope ...")
    ] = None,
    peer: Annotated[
        str | None, typer.Option(help="Compare another library's quantised model: torchao, torchao-int4, quanto-int4 ...")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items a task; for text, tokens a slice. None: all.")] = None,
    model: Model = "default",
    seed: Annotated[int, typer.Option(help="Which calibration text, and the bootstrap.")] = 0,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Score a model, or what a recipe costs it: bits a byte, KL in nats and top-1 agreement, with intervals.

    \b
    Example:  labkit eval text --recipe int4_g64_zp --limit 2048
              labkit eval text --kv-format int4 --limit 4096
              labkit eval text --peer torchao-int4 --limit 2048
    """
    unknown = [task for task in tasks if task not in TASKS]
    if unknown:
        raise BadRequest(f"task {unknown[0]!r} is unknown; choose from {', '.join(TASKS)}")
    if method and not recipe:
        raise BadRequest(
            f"--method {method} quantises by a recipe and none was given; add for example --recipe int4_g64_zp"
        )
    if peer and (recipe or kv_format):
        raise BadRequest(f"--peer {peer} is another library's model and takes no --recipe or --kv-format; leave those out")
    from labkit.bench import peers, quantized_peers
    from labkit.evals import text, through_cache
    from labkit.quant.recipe import Recipe

    if peer:
        peers.check([peer], quantized_peers.PACKAGES)

    chosen = Recipe.named(recipe) if recipe else None
    how = through_cache.ThroughCache.up_to(kv_format, limit) if kv_format else None
    use_threads(threads)
    loaded = _load(model, device)
    if how is None:
        passages = text.TextTask(loaded.tokenizer, limit=limit).items()
    else:
        passages = through_cache.passages(loaded.tokenizer, limit, how.length)
    name = loaded.name
    say(f"{len(passages)} passages, {sum(len(passage.tokens) for passage in passages):,} tokens")
    reference = None
    if chosen is not None:
        # The reference keeps its own weights: quantising happens in place, in a model loaded once more.
        reference, loaded = text.Remembered(loaded, passages, Steps()), _load(model, device)
        _quantize(loaded, chosen, method, 64, seed)
    if peer:
        reference = text.Remembered(loaded, passages, Steps())
        loaded = quantized_peers.quantized_peer(peer, peers.folder_of(model), device)
    if how is None:
        scores = text.evaluate(loaded, passages, reference, progress=Steps())
    else:
        scores = through_cache.evaluate(loaded, passages, how, reference, Steps())
    rows = text.results(scores, seed)
    lines = [f"{row['task']}  {row['slice']:8}{row['metric']:16}{_number(row)}  n = {row['n']:,}" for row in rows]
    named = {"recipe": recipe, "kv_format": how and how.kv_format.name, "peer": peer, "model": name}
    answer({"results": rows, **named}, as_json, "\n".join(lines))


def _number(row: dict) -> str:
    between = f" [{row['low']:.4f}, {row['high']:.4f}]" if row["low"] is not None else ""
    return f"{row['value']:.4f}{between}"


def _load(model: str, device: str, reads_text: bool = True):
    """In float32: what is measured is the weights' change, not that of the arithmetic."""
    import torch

    from labkit.model.load import load_model

    loaded = load_model(model, dtype=torch.float32, device=device)
    if loaded.tokenizer is None and reads_text:
        raise BadRequest(f"model {model!r} has no tokenizer, so it cannot read a text; give a folder that has one")
    return loaded


def _quantize(model, recipe, method: str | None, sequences: int, seed: int):
    from labkit.model.folding import fold_map
    from labkit.quant import Calibration, quantize_model
    from labkit.quant.methods import Method

    wanted = Method(method or recipe.method)
    calibration = None
    if wanted.calibrated:
        from labkit.texts import calibration_text

        text = [calibration_text("code", seed), calibration_text("prose", seed)]
        calibration = Calibration.from_text(text, model.tokenizer, sequences=sequences, seed=seed)
    folds = fold_map(model) if "awq" in wanted.parts else ()
    return quantize_model(model, recipe, wanted, calibration, folds=folds, progress=Steps())
