"""`bench decode`: time per output token, arm against arm, beside what was predicted and what memory allows.

Share of bandwidth = bytes a step must read / TPOT / read-only bandwidth of this machine, measured in the same run.
The prediction comes from operator microbenchmarks made before the first token (`labkit.bench.operators`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labkit.bench import arms as own
from labkit.bench import peers as others
from labkit.bench.explain import render as render_budget
from labkit.bench.harness import Arm, agreement, compare, ratio_lines, ratios, summary, table
from labkit.errors import BadRequest
from labkit.measure.bandwidth import read_bandwidth, using_threads


def run(
    model="default",
    formats: Sequence[str] = ("fp32", "bf16"),
    peers: Sequence[str] = (),
    threads: int | None = None,
    prompt_tokens: int = 128,
    new_tokens: int = 128,
    repeats: int = 3,
    device="cpu",
    predicted: bool = True,
    on_progress: Callable[[str], None] | None = None,
    kernels: str = "auto",
    explain: bool = False,
) -> dict:
    """The keys of the command `bench decode`, and `prompt_tokens`, `new_tokens`, intervals and predictions; `explain`
    adds to each of labkit's arms the `budget` of one step (`labkit.bench.explain`)."""
    check(formats, prompt_tokens, new_tokens, repeats)
    others.check(peers)
    with using_threads(threads) as used:
        bandwidth = read_bandwidth(device, used)
        built, prompt = build(model, formats, peers, prompt_tokens, new_tokens, used, device, predicted, on_progress, kernels)
        runs = compare(
            built, prompt, new_tokens, repeats, device, lambda i: on_progress and on_progress(f"round {i} of {repeats}")
        )
        budgets = {a.name: a.explain(prompt, bandwidth) for a in built if explain and a.explain is not None}
    result = report(built, runs, "tpot_s", 1)
    for arm in built:
        entry = result["arms"][arm.name]
        seconds = entry["tpot_ms"] / 1000
        entry["bandwidth_share"] = None if arm.bytes_per_step is None else arm.bytes_per_step / seconds / bandwidth
        if arm.name in budgets:
            entry["budget"] = budgets[arm.name]
        entry["roofline_tpot_ms"] = None if arm.bytes_per_step is None else 1000 * arm.bytes_per_step / bandwidth
    return {
        **result,
        "bandwidth_gb_s": bandwidth / 1e9,
        "threads": used,
        "device": str(device),
        "model": str(model),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "repeats": repeats,
    }


def check(formats, prompt_tokens: int, new_tokens: int, repeats: int) -> None:
    for name in formats:
        own.get_recipe(name)
    if prompt_tokens < 1 or new_tokens < 2 or repeats < 1:
        raise BadRequest(
            f"{prompt_tokens} prompt tokens, {new_tokens} new ones and {repeats} repeats time nothing; "
            "give at least 1, 2 and 1."
        )


def build(model, formats, peers, prompt_tokens, new_tokens, threads, device, predicted, on_progress, kernels):
    """All arms, loaded, and the prompt that every one of them gets."""
    built: list[Arm] = []
    prompt = None
    for name in formats:
        if on_progress:
            on_progress(f"loading {name}")
        decoder = own.load(model, name, device, kernels)
        prompt = prompt or own.prompt_ids(decoder, prompt_tokens)
        built.append(
            own.labkit_arm(
                decoder, name, prompt_tokens, new_tokens, device=device, threads=threads, predicted=predicted
            )
        )
    for name in peers:
        if on_progress:
            on_progress(f"loading {name}")
        prompt = prompt or own.prompt_ids(own.load(model, "bf16", device), prompt_tokens)
        built.append(others.peer_arm(name, model, prompt_tokens + new_tokens, threads, device))
    return built, prompt


def report(built: Sequence[Arm], runs: dict, what: str, tokens: int) -> dict:
    """Arms and ratios from the runs; `what` is the time that the bench is about, for `tokens` tokens."""
    seconds = {name: [getattr(run, what) for run in kept] for name, kept in runs.items()}
    pairs = ratios(seconds)
    first = runs[built[0].name]
    result: dict = {
        "arms": {},
        "ratios": {pair: ratio.value for pair, ratio in pairs.items()},
        "ratio_intervals": {pair: [ratio.low, ratio.high] for pair, ratio in pairs.items()},
    }
    for arm in built:
        middle, low, high = summary(seconds[arm.name])
        ttft, ttft_low, ttft_high = summary([run.ttft_s for run in runs[arm.name]])
        entry = {
            "tok_s": tokens / middle,
            "tok_s_low": tokens / high,
            "tok_s_high": tokens / low,
            "ttft_ms": 1000 * ttft,
            "ttft_ms_low": 1000 * ttft_low,
            "ttft_ms_high": 1000 * ttft_high,
            "predicted_ttft_ms": _ms(arm.predicted_ttft_s),
            "same_first_tokens": agreement(runs[arm.name], first),
            "note": arm.note,
        }
        if what == "tpot_s":
            entry |= {
                "tpot_ms": 1000 * middle,
                "tpot_ms_low": 1000 * low,
                "tpot_ms_high": 1000 * high,
                "predicted_tpot_ms": _ms(arm.predicted_tpot_s),
            }
        result["arms"][arm.name] = entry
    return result


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def shown(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def render(result: dict) -> str:
    """The result as a table for people."""
    rows = [
        (
            name,
            shown(a["tok_s"], ".1f"),
            shown(a["tpot_ms"]),
            f"{shown(a['tpot_ms_low'])}-{shown(a['tpot_ms_high'])}",
            shown(a["predicted_tpot_ms"]),
            shown(a["bandwidth_share"], ".0%"),
            shown(a["ttft_ms"], ".1f"),
            shown(a["predicted_ttft_ms"], ".1f"),
        )
        for name, a in result["arms"].items()
    ]
    head = (
        f"decode: {result['prompt_tokens']} prompt tokens, {result['new_tokens']} new, {result['threads']} threads on "
        f"{result['device']}, {result['repeats']} rounds; read-only bandwidth {result['bandwidth_gb_s']:.1f} GB/s"
    )
    body = table(("arm", "tok/s", "TPOT ms", "interval", "predicted", "of bandwidth", "TTFT ms", "predicted"), rows)
    budgets = [render_budget(name, a["budget"]) for name, a in result["arms"].items() if "budget" in a]
    return "\n".join([head, body, "ratios of tok/s, paired by round:", ratio_lines(result), *budgets])
