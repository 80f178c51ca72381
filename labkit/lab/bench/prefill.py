"""`bench prefill`: time to the first token of a prompt, next to its prediction.

tok/s are prompt tokens per TTFT. Prefill uses each weight once per prompt token, so
arithmetic limits it, not memory.
"""

from __future__ import annotations

from dataclasses import replace

from labkit.lab.bench import harness
from labkit.lab.bench.arms import Load, measure
from labkit.lab.bench.decode import first_token
from labkit.lab.bench.harness import Progress, silent

COLUMNS = {
    "tok/s": "{tok_s:.0f}",
    "TTFT ms": "{ttft_ms:.1f}",
    "interval": "{ttft_ms_low:.1f}-{ttft_ms_high:.1f}",
    "predicted": "{predicted_ttft_ms:.1f}",
}
HEADLINE = "prefill: {prompt_tokens} prompt tokens, {threads} threads on {device}, {repeats} rounds"


def run(load: Load, *, on_progress: Progress = silent) -> dict:
    """Return the result of `bench prefill`; every arm generates one token."""
    measured = measure(replace(load, new_tokens=1), on_progress)
    seconds = {name: [run.ttft_s for run in runs] for name, runs in measured.runs.items()}
    entries = {
        arm.name: harness.rate(seconds[arm.name], load.prompt_tokens) | first_token(measured, arm)
        for arm in measured.arms
    }
    return {"arms": entries, **harness.ratio_keys(harness.ratios(seconds)), **measured.facts}


def render(result: dict) -> str:
    """Return the result of `run` as a table."""
    return harness.render(result, HEADLINE, COLUMNS)
