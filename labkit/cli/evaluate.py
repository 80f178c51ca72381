"""The command `eval`: tasks scored item by item, and two runs held against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from labkit.cli.answer import Device, Json, Model, Steps, Threads, answer, use_threads
from labkit.cli.subject import Subject
from labkit.errors import BadRequest

SHOWN = 8  # flipped items printed a task


def evaluate(
    tasks: Annotated[list[str], typer.Argument(help="text, humaneval, mmlu, structured, or a .jsonl file of your own.")],
    recipe: Annotated[str | None, typer.Option(help="Score the model in this recipe or format.")] = None,
    method: Annotated[str | None, typer.Option(help="rtn, gptq, awq, clip or joined by +; none: the recipe's own.")] = None,
    kv_format: Annotated[
        str | None, typer.Option(help="Read through a KV cache in this format: int8, int4, fp8, int4_prerope ...")
    ] = None,
    peer: Annotated[
        str | None, typer.Option(help="For text: another library's quantised model: torchao, torchao-int4, quanto-int4 ...")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items a task; for text, tokens a slice. None: all.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Records of an earlier run (--out) of the same tasks and options, to be compared with.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Keep every item here; a killed run goes on from it.")] = None,
    slices: Annotated[
        str | None, typer.Option(help="For text: code, prose, reasoning, library, de, es ... joined by commas. None: most.")
    ] = None,
    shots: Annotated[int, typer.Option(min=0, max=4, help="MMLU: examples before each question.")] = 0,
    scoring: Annotated[str, typer.Option(help="MMLU: text, letter, generated, joined by commas.")] = "text,letter",
    languages: Annotated[str, typer.Option(help="MMLU: en, de, es, fr, hi, it, pt, th, or all.")] = "en",
    mode: Annotated[
        str | None, typer.Option(help="HumanEval: plain or chat. None: chat for a model made to chat, plain for others.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest text to write an item (none: 256 for HumanEval, 128 for others).")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Arithmetic: fp32 or bf16 (none: fp32 for text, bf16 for the others).")
    ] = None,
    model: Model = "default",
    seed: Annotated[int, typer.Option(help="Which calibration text and examples, and the bootstrap.")] = 0,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Score a model on tasks, item by item and with intervals; what a recipe costs; which items flipped.

    Exits 0 when everything was scored, whatever the verdicts say: of twenty rows without any change one says worse or
    better. A script that is to decide reads `comparisons` of --json.

    \b
    Example:  labkit eval text --recipe int4_g64_zp --limit 2048
              labkit eval mmlu structured --out before.jsonl
              labkit eval mmlu structured --recipe int4_channel --against before.jsonl
              labkit eval my_prompts.jsonl --recipe int4
    """
    from labkit.evals.report import compare, flipped, results
    from labkit.evals.task import make_task, read_scores, run

    subject = Subject(model, recipe, method, kv_format, peer, dtype, device, seed)
    subject.check(tasks)
    _check_earlier(tasks, against, out)
    parts = {"shots": shots, "scoring": scoring, "languages": languages, "mode": mode, "slices": slices,
             "budget": max_new_tokens}  # fmt: skip
    for name in tasks:  # before a model is loaded
        _check(name, tasks)
    options = {name: _options(name, seed, **parts) for name in tasks}
    use_threads(threads)
    rows, verdicts, flips, notes = [], [], [], {}
    for name in tasks:
        loaded = subject.model(name)
        if name == "text":
            task = subject.text_task(limit, **options[name])
        else:
            task = make_task(name, loaded, limit, **options[name], **({"reader": subject.reader()} if kv_format else {}))
        chosen = options[name] | {key: getattr(task, key) for key in ("mode", "max_new_tokens") if hasattr(task, key)}
        asked = {key: list(value) if isinstance(value, tuple) else value for key, value in chosen.items()}
        before = read_scores(against, task.name, asked) if against else None  # refused where something else was asked
        settings = {**subject.settings(name), "limit": limit, "seed": seed, **asked}
        scores = run(task, loaded, out, settings=settings, progress=Steps())
        rows += results(task.metrics, task.name, scores, seed)
        notes |= {task.name: list(getattr(task, "notes", ()))}
        if before:
            verdicts += compare(task.metrics, task.name, before, scores, seed)
            flips += [{"task": task.name, **one} for one in flipped(task.metrics, before, scores)]
    result = {"results": rows, "recipe": recipe, "kv_format": subject.kv_name, "peer": peer, "model": subject.name,
              "notes": {task: lines for task, lines in notes.items() if lines}}  # fmt: skip
    if against is not None:
        result |= {"against": str(against), "comparisons": verdicts, "flipped": flips}
    answer(result, as_json, "\n".join([*_table(rows), *_notes(notes), *_verdicts(verdicts), *_flips(flips)]))


def _check(name: str, tasks: list[str]) -> None:
    """Refuse an unknown task, one asked for twice, or a file with a line that cannot be used."""
    from labkit.evals.own_data import read_items
    from labkit.evals.task import TASKS

    if tasks.count(name) > 1:
        raise BadRequest(f"task {name!r} was given twice; give each task once")
    if name not in TASKS:
        if Path(name).suffix != ".jsonl" and not Path(name).is_file():
            raise BadRequest(f"task {name!r} is unknown; choose from {', '.join(TASKS)}, or give a .jsonl file of your own")
        read_items(name)


def _options(name: str, seed: int, shots: int, scoring: str, languages: str, mode: str | None, slices: str | None,
             budget: int | None) -> dict:  # fmt: skip
    """What the task of a name is made with; refuses what is not there."""
    length = {"max_new_tokens": budget} if budget else {}
    if name == "text":
        from labkit.evals.text_task import SLICES, check_slices

        return {"slices": check_slices(tuple(slices.split(",")) if slices else SLICES)}
    if name == "humaneval":
        from labkit.evals.humaneval import make

        make(None, mode=mode)
        return {"mode": mode, **length}
    if name == "mmlu":
        from labkit.evals.mmlu import MMLU
        from labkit.texts import LANGUAGES

        chosen = LANGUAGES if languages == "all" else tuple(languages.split(","))
        options = {"shots": shots, "scoring": tuple(scoring.split(",")), "languages": chosen, "seed": seed}
        MMLU(**options)
        return options
    return length


def _check_earlier(tasks: list[str], against: Path | None, out: Path | None) -> None:
    """Refuse a run to compare with that is not there, holds other tasks, or would be written to."""
    if against is None:
        return
    if not against.is_file():
        raise BadRequest(f"there is no file {str(against)!r}; --against wants the records that an earlier run wrote with --out")
    if out is not None and out.exists() and out.samefile(against):
        raise BadRequest(f"--out and --against are both {str(out)!r}; write the new run to a file of its own")
    from labkit.evals.task import tasks_in

    held = tasks_in(against)
    wanted = [name if not Path(name).suffix else Path(name).stem for name in tasks]
    missing = [name for name in wanted if name not in held]
    if missing:
        raise BadRequest(f"{str(against)!r} holds {', '.join(held) or 'no task'} and not {missing[0]}; run that there first")


def _table(rows: list[dict]) -> list[str]:
    found = []
    for row in rows:
        between = f" [{row['low']:.4f}, {row['high']:.4f}]" if row["low"] is not None else ""
        chance = f"  chance {row['chance']:.2f}" if row["chance"] is not None else ""
        lost = "".join(f"  {row[key]} {key}" for key in ("errors", "trimmed") if row[key])
        found.append(f"{row['task']}  {row['slice']:10}{row['metric']:20}{row['value']:9.4f}{between}  n = {row['n']:,}{chance}{lost}")
    return found


def _verdicts(rows: list[dict]) -> list[str]:
    found = ["", "Compared item by item, this run minus the earlier one:"] if rows else []
    for row in rows:
        between = f" [{row['low']:+.4f}, {row['high']:+.4f}]" if row["low"] is not None else ""
        found.append(f"{row['task']}  {row['slice']:10}{row['metric']:20}{row['difference']:+9.4f}{between}  {row['verdict']}"
                     f"  ({row['fell']} fell, {row['rose']} rose, {row['ties']} stayed)")  # fmt: skip
    return found


def _flips(flips: list[dict]) -> list[str]:
    found = [""] if flips else []
    for task, metric in dict.fromkeys((one["task"], one["metric"]) for one in flips):
        here = [one for one in flips if (one["task"], one["metric"]) == (task, metric)]
        found.append(f"{task} {metric}: {len(here)} flipped")
        found += [f"  {one['item']}: {'right' if one['was'] else 'wrong'} -> {'right' if one['is'] else 'wrong'}"
                  + "".join(f"\n    {word}: {_shown(one[word])}" for word in ("before", "after")) for one in here[:SHOWN]]
        found += [f"  and {len(here) - SHOWN} more"] if len(here) > SHOWN else []
    return found


def _shown(details: dict) -> str:
    """What was chosen or written, in a line."""
    kept = {key: value for key, value in details.items() if not key.endswith("ids") and value is not None}
    text = ", ".join(f"{key} {str(value).strip()!r}" for key, value in kept.items())
    return text if len(text) <= 160 else text[:157] + "..."


def _notes(notes: dict[str, list[str]]) -> list[str]:
    return [f"{task}: {line}" for task, lines in notes.items() for line in lines]
