"""`bench prefill`: time to the first token of a prompt, arm against arm, beside the prediction.

tok/s are prompt tokens over TTFT. Prefill uses each weight once per prompt token, so arithmetic bounds it, not memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labkit.bench import peers as others
from labkit.bench.decode import build, check, report, shown
from labkit.bench.harness import compare, ratio_lines, table
from labkit.measure.bandwidth import read_bandwidth, using_threads


def run(
    model="default",
    formats: Sequence[str] = ("fp32", "bf16"),
    peers: Sequence[str] = (),
    threads: int | None = None,
    prompt_tokens: int = 512,
    repeats: int = 3,
    device="cpu",
    predicted: bool = True,
    on_progress: Callable[[str], None] | None = None,
    kernels: str = "auto",
) -> dict:
    """The keys of the command `bench prefill`; every arm reads the same prompt and emits one token."""
    check(formats, prompt_tokens, 2, repeats)
    others.check(peers)
    with using_threads(threads) as used:
        built, prompt = build(model, formats, peers, prompt_tokens, 1, used, device, predicted, on_progress, kernels)
        runs = compare(
            built, prompt, 1, repeats, device, lambda i: on_progress and on_progress(f"round {i} of {repeats}")
        )
        bandwidth = read_bandwidth(device, used)
    return {
        **report(built, runs, "ttft_s", prompt_tokens),
        "threads": used,
        "device": str(device),
        "model": str(model),
        "prompt_tokens": prompt_tokens,
        "repeats": repeats,
        "bandwidth_gb_s": bandwidth / 1e9,
    }


def render(result: dict) -> str:
    """The result of `run` as a table for people."""
    rows = [
        (
            name,
            shown(a["tok_s"], ".0f"),
            shown(a["ttft_ms"], ".1f"),
            f"{shown(a['ttft_ms_low'], '.1f')}-{shown(a['ttft_ms_high'], '.1f')}",
            shown(a["predicted_ttft_ms"], ".1f"),
        )
        for name, a in result["arms"].items()
    ]
    head = (
        f"prefill: {result['prompt_tokens']} prompt tokens, {result['threads']} threads on {result['device']}, "
        f"{result['repeats']} rounds"
    )
    body = table(("arm", "tok/s", "TTFT ms", "interval", "predicted"), rows)
    return "\n".join([head, body, "ratios of tok/s, paired by round:", ratio_lines(result)])
