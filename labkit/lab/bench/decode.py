"""`bench decode`: time per output token, next to its prediction and lower bound.

Share of bandwidth = bytes that a step must read / TPOT / read-only bandwidth, measured
in the same run. The prediction comes from operator microbenchmarks made before the
first token (`labkit.lab.bench.operators`).
"""

from __future__ import annotations

from itertools import takewhile

from labkit.errors import BadRequest
from labkit.lab.bench import explain as budgets
from labkit.lab.bench import harness
from labkit.lab.bench.arms import Load, Measured, measure
from labkit.lab.bench.harness import Arm, Progress, silent
from labkit.lab.measure.bandwidth import using_threads

COLUMNS = {
    "tok/s": "{tok_s:.1f}",
    "TPOT ms": "{tpot_ms:.2f}",
    "interval": "{tpot_ms_low:.2f}-{tpot_ms_high:.2f}",
    "predicted TPOT": "{predicted_tpot_ms:.2f}",
    "of bandwidth": "{bandwidth_share:.0%}",
    "TTFT ms": "{ttft_ms:.1f}",
    "predicted TTFT": "{predicted_ttft_ms:.1f}",
}


def run(load: Load, *, explain: bool = False, on_progress: Progress = silent) -> dict:
    """Return the result of `bench decode`: arms, ratios and settings.

    `explain` adds the `budget` of one step to each of labkit's arms
    (`labkit.lab.bench.explain`). Raises BadRequest for fewer than two new tokens.
    """
    if load.new_tokens < 2:
        raise BadRequest(f"new_tokens is {load.new_tokens}; a time per token needs at least 2.")
    entries = {}
    with using_threads(load.threads):  # for the budgets too
        measured = measure(load, on_progress)
        seconds = {name: [run.tpot_s for run in runs] for name, runs in measured.runs.items()}
        for arm in measured.arms:
            spread = harness.spread("tpot_ms", seconds[arm.name], 1000)
            nbytes, bandwidth = arm.bytes_per_step, measured.bandwidth
            roofline_ms = None if nbytes is None else 1000 * nbytes / bandwidth
            entry = {
                **harness.rate(seconds[arm.name]),
                **spread,
                "predicted_tpot_ms": arm.predicted_tpot_ms,
                **first_token(measured, arm),
                "roofline_tpot_ms": roofline_ms,
                "bandwidth_share": roofline_ms and roofline_ms / spread["tpot_ms"],
            }
            if explain and arm.explain:
                entry["budget"] = arm.explain(measured.prompt, bandwidth)
            entries[arm.name] = entry
    return {"arms": entries, **harness.ratio_keys(harness.ratios(seconds)), **measured.facts}


def first_token(measured: Measured, arm: Arm) -> dict:
    """Return the keys of an arm that `bench prefill` and `bench decode` share.

    `same_first_tokens` counts the leading tokens that equal those of the first arm.
    """
    runs, reference = measured.runs[arm.name], measured.runs[measured.arms[0].name]
    pairs = zip(runs[0].tokens, reference[0].tokens)
    return {
        **harness.spread("ttft_ms", [run.ttft_s for run in runs], 1000),
        "predicted_ttft_ms": arm.predicted_ttft_ms,
        "same_first_tokens": sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)),
        "note": arm.note,
    }


def render(result: dict) -> str:
    """Return the result as a table, followed by the budgets of its arms."""
    headline = (
        "decode: {prompt_tokens} prompt tokens, {new_tokens} new, {threads} threads on {device}, "
        "{repeats} rounds; read-only bandwidth {bandwidth_gb_s:.1f} GB/s"
    )
    lines = [harness.render(result, headline, COLUMNS)]
    lines += [
        budgets.render(name, arm["budget"])
        for name, arm in result["arms"].items()
        if "budget" in arm
    ]
    return "\n".join(lines)
