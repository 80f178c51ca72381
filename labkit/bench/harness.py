"""One harness for the benches: arms in turns on the same tokens, ratios round by round, a table and one JSON object.

An arm is a name and a function that continues a prompt (token ids) by exactly n tokens and says when each was
known. The harness refuses an arm that emits another number of tokens. Each round runs every arm once and begins
with another one; the first round is warm-up and is thrown away. Ratios are of tok/s, for every ordered pair.
When it loses: arms share the machine with whatever else runs; ratios survive that better than absolute numbers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit.errors import BadRequest
from labkit.measure.clock import Ratio, Timing, interleave, median_interval, median_ratio


@dataclass(frozen=True)
class Run:
    """One run of one arm: the tokens it emitted, and seconds from the start until each was known."""

    tokens: tuple[int, ...]
    times_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.times_s[0]

    @property
    def tpot_s(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)


@dataclass(frozen=True)
class Arm:
    """`bytes_per_step` (what a decode step must read) and the predictions are None where nobody can say."""

    name: str
    run: Callable[[Sequence[int], int], Run]
    bytes_per_step: float | None = None
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    note: str = ""
    explain: Callable[[Sequence[int], float], dict] | None = None  # prompt, bandwidth -> labkit.bench.explain.budget


def compare(
    arms: Sequence[Arm],
    prompt: Sequence[int],
    new_tokens: int,
    repeats: int,
    device="cpu",
    on_round: Callable[[int], None] | None = None,
) -> dict[str, list[Run]]:
    """Every arm `repeats` times, interleaved; only the runs that count are returned."""
    names = [arm.name for arm in arms]
    if len(set(names)) != len(names) or not names:
        raise BadRequest(f"the arms {names} cannot be compared; give at least one, each once.")
    runs: dict[str, list[Run]] = {name: [] for name in names}

    def once(arm: Arm):
        def call():
            run = arm.run(prompt, new_tokens)
            if len(run.tokens) != new_tokens or len(run.times_s) != new_tokens:
                raise RuntimeError(
                    f"arm {arm.name} emitted {len(run.tokens)} tokens where {new_tokens} were asked for; "
                    "its time cannot be compared."
                )
            runs[arm.name].append(run)

        return call

    interleave({arm.name: once(arm) for arm in arms}, repeats=repeats, warmup=1, device=device, on_round=on_round)
    return {name: kept[-repeats:] for name, kept in runs.items()}


def ratios(seconds: dict[str, Sequence[float]]) -> dict[str, Ratio]:
    """ "A/B": how many times the tok/s of B the arm A reached, paired by round, for every ordered pair."""
    return {
        f"{a}/{b}": median_ratio([y / x for x, y in zip(seconds[a], seconds[b], strict=True)])
        for a in seconds
        for b in seconds
        if a != b
    }


def summary(timing: Sequence[float]) -> tuple[float, float, float]:
    """Median seconds and their interval."""
    low, high, _ = median_interval(timing)
    return statistics.median(timing), low, high


def agreement(runs: Sequence[Run], reference: Sequence[Run]) -> int:
    """How many first tokens two arms have in common; greedy float32 arms should agree in all."""
    mine, theirs = runs[0].tokens, reference[0].tokens
    return next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of plain text, numbers to the right."""
    widths = [max(len(str(row[i])) for row in [headers, *rows]) for i in range(len(headers))]
    lines = []
    for row in [headers, *rows]:
        cells = [
            str(cell).ljust(width) if i == 0 else str(cell).rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def ratio_lines(result: dict) -> str:
    """The ratios above 1 as text; a slowdown is the same pair the other way round."""
    lines = []
    for pair, value in result["ratios"].items():
        low, high = result["ratio_intervals"][pair]
        if value >= 1:
            lines.append(f"  {pair}: {value:.2f} [{low:.2f}, {high:.2f}]")
    return "\n".join(lines)


def as_json(result: dict) -> str:
    """The last line of a bench: one JSON object."""
    return json.dumps({key: value for key, value in result.items() if not key.startswith("_")}, allow_nan=False)


def to_timing(runs: Sequence[Run]) -> Timing:
    return Timing(tuple(run.tpot_s for run in runs))
