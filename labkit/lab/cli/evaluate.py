"""`labkit eval`: score tasks item by item, and compare two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from labkit.lab.cli.answer import Device, Json, Method, Model, Steps, Threads, answer, use_threads
from labkit.lab.tables import table

SHOWN = 8  # flipped items printed per task
TASKS = "text, humaneval, mmlu, structured, or a .jsonl file of your own."
RECIPE = "Score the model in this recipe or format."
KV_FORMAT = "Read through a KV cache in this format: int8, int4, fp8, int4_prerope ..."
PEER = "For text: another library's quantized model: torchao, torchao-int4, quanto-int4 ..."
LIMIT = "Items per task; for text, tokens per slice. Default: all."
AGAINST = "Records of an earlier run (--out) of the same tasks and options, to compare with."
OUT = "Write a record of every item here; a killed run resumes from it."
SLICES = "For text: code, prose, reasoning, library, de, es ... joined by commas. Default: most."
SCORING = "MMLU: text, letter, generated, joined by commas."
LANGUAGES = "MMLU: en, de, es, fr, hi, it, pt, th, or all."
MODE = "HumanEval: plain or chat. Default: chat for a chat model, plain for others."
LONGEST = "Maximum number of new tokens per item. Default: 256 for HumanEval, 128 for others."
DTYPE = "Arithmetic: fp32 or bf16. Default: fp32 for text, bf16 for the others."
SEED = "Seed of the calibration text, the examples and the bootstrap."


def evaluate(
    tasks: Annotated[list[str], typer.Argument(help=TASKS)],
    recipe: Annotated[str | None, typer.Option(help=RECIPE)] = None,
    method: Method = None,
    kv_format: Annotated[str | None, typer.Option(help=KV_FORMAT)] = None,
    peer: Annotated[str | None, typer.Option(help=PEER)] = None,
    limit: Annotated[int | None, typer.Option(min=1, help=LIMIT)] = None,
    against: Annotated[Path | None, typer.Option(help=AGAINST)] = None,
    out: Annotated[Path | None, typer.Option(help=OUT)] = None,
    slices: Annotated[str | None, typer.Option(help=SLICES)] = None,
    shots: Annotated[int, typer.Option(min=0, max=4, help="MMLU: examples per question.")] = 0,
    scoring: Annotated[str, typer.Option(help=SCORING)] = "text,letter",
    languages: Annotated[str, typer.Option(help=LANGUAGES)] = "en",
    mode: Annotated[str | None, typer.Option(help=MODE)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help=LONGEST)] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE)] = None,
    model: Model = "default",
    seed: Annotated[int, typer.Option(help=SEED)] = 0,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Score a model on tasks, item by item and with intervals.

    Exits 0 if everything was scored, also if a score fell. By chance, about one
    unchanged row in twenty is called better or worse. A script should read
    `comparisons` in the output of --json.

    \b
    Example:  labkit eval text --recipe int4_g64_zp --limit 2048
              labkit eval mmlu structured --out before.jsonl
              labkit eval mmlu structured --recipe int4_channel --against before.jsonl
              labkit eval my_prompts.jsonl --recipe int4
    """
    from labkit.lab.evals import evaluation
    from labkit.lab.evals.model_under_test import ModelUnderTest
    from labkit.lab.texts import LANGUAGES as ALL

    length = {"max_new_tokens": max_new_tokens} if max_new_tokens else {}
    chosen = ALL if languages == "all" else tuple(languages.split(","))
    mmlu = {"shots": shots, "scoring": tuple(scoring.split(",")), "languages": chosen}
    options = {
        "text": {"slices": tuple(slices.split(","))} if slices else {},
        "mmlu": mmlu | {"seed": seed},
        "humaneval": {"mode": mode, **length},
        "structured": length,
        "own": length,
    }
    choices = (recipe, method, kv_format, peer, dtype, device, seed)
    subject = ModelUnderTest(model, *choices, progress=Steps())
    settings = evaluation.Evaluation(tasks, subject, limit, options, against, out)
    use_threads(threads)
    result = evaluation.evaluate(settings, Steps())
    text = [_scores(result["results"])]
    text += [f"{task}: {line}" for task, lines in result["notes"].items() for line in lines]
    if result.get("comparisons"):
        text += ["", "Compared item by item, this run minus the earlier one:"]
        text += [_verdicts(result["comparisons"]), *_flips(result["flipped"])]
    answer(result, as_json, "\n".join(text))


def _scores(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        lost = ", ".join(f"{row[key]} {key}" for key in ("errors", "trimmed") if row[key])
        chance = None if row["chance"] is None else f"{row['chance']:.2f}"
        value = (f"{row['value']:.4f}", _between(row, ".4f"), f"{row['n']:,}", chance, lost)
        cells.append((row["task"], row["slice"], row["metric"], *value))
    return table(("task", "slice", "metric", "value", "95 %", "n", "chance", ""), cells)


def _verdicts(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        counts = (row["fell"], row["rose"], row["ties"])
        value = (f"{row['difference']:+.4f}", _between(row, "+.4f"), *counts, row["verdict"])
        cells.append((row["task"], row["slice"], row["metric"], *value))
    names = ("task", "slice", "metric", "difference", "95 %", "fell", "rose", "stayed", "verdict")
    return table(names, cells)


def _between(row: dict, form: str) -> str | None:
    return None if row["low"] is None else f"[{row['low']:{form}}, {row['high']:{form}}]"


def _flips(flips: list[dict]) -> list[str]:
    lines = [""] if flips else []
    for task, metric in dict.fromkeys((flip["task"], flip["metric"]) for flip in flips):
        here = [flip for flip in flips if (flip["task"], flip["metric"]) == (task, metric)]
        lines.append(f"{task} {metric}: {len(here)} flipped")
        for flip in here[:SHOWN]:
            was, now = ("right" if flip[key] else "wrong" for key in ("was", "is"))
            lines.append(f"  {flip['item']}: {was} -> {now}")
            lines += [f"    {key}: {_short(flip[key])}" for key in ("before", "after")]
        if len(here) > SHOWN:
            lines.append(f"  and {len(here) - SHOWN} more")
    return lines


def _short(details: dict) -> str:
    """Return an item's answer as one line of up to 160 characters."""
    parts = [(key, value) for key, value in details.items() if value is not None]
    text = ", ".join(f"{key} {str(value).strip()!r}" for key, value in parts if key[-3:] != "ids")
    return text if len(text) <= 160 else text[:157] + "..."
