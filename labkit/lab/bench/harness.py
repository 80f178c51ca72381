"""The harness of the benches: interleaved arms, paired ratios, one table.

An arm is a name and a function that continues a prompt (token ids) by exactly n tokens
and reports the time of each token. A run with another number of tokens is an error.
Every round runs each arm once and starts with a different arm. A warm-up round comes
first and is not counted. Ratios compare the tok/s of every ordered pair of arms.
Limitation: other programs on the machine slow all arms. That changes ratios less than
absolute numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from labkit.errors import BadRequest
from labkit.lab.measure.clock import Ratio, Timing, interleave, median_ratio
from labkit.lab.tables import columns_of

Progress = Callable[[str], object]


def silent(text: str) -> None:
    """The progress callback that shows nothing."""


@dataclass(frozen=True)
class Run:
    """One run of one arm: its tokens, and seconds from the start to each of them."""

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
    """One arm. `bytes_per_step` is the number of bytes that a decode step must read.

    `bytes_per_step` and the predictions are None if they are unknown. `explain(prompt,
    bandwidth)` returns the budget of one step (`labkit.lab.bench.explain.budget`).
    """

    name: str
    run: Callable[[Sequence[int], int], Run]
    bytes_per_step: float | None = None
    predicted_ttft_ms: float | None = None
    predicted_tpot_ms: float | None = None
    note: str = ""
    explain: Callable[[Sequence[int], float], dict] | None = None


def check_arms(names: Sequence[str]) -> None:
    """Raise BadRequest unless there is at least one name and all names differ."""
    if not names or len(set(names)) < len(names):
        arms = ", ".join(names) or "empty"
        raise BadRequest(f"The list of arms is {arms}; name at least one, and each arm once.")


def compare(
    arms: Sequence[Arm],
    prompt: Sequence[int],
    new_tokens: int,
    repeats: int,
    device="cpu",
    on_round: Callable[[int], object] | None = None,
) -> dict[str, list[Run]]:
    """Run every arm `repeats` times, interleaved; return {arm: runs} without the warm-up.

    Raises RuntimeError if an arm generates another number of tokens than `new_tokens`.
    """
    runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}

    def once(arm: Arm) -> None:
        run = arm.run(prompt, new_tokens)
        if not len(run.tokens) == len(run.times_s) == new_tokens:
            raise RuntimeError(
                f"Arm {arm.name} generated {len(run.tokens)} of {new_tokens} tokens."
            )
        runs[arm.name].append(run)

    calls = {arm.name: lambda arm=arm: once(arm) for arm in arms}
    interleave(calls, repeats=repeats, device=device, on_round=on_round)
    return {name: all_runs[-repeats:] for name, all_runs in runs.items()}


def ratios(seconds: Mapping[str, Sequence[float]]) -> dict[str, Ratio]:
    """Return {"A/B": how many times faster A was than B}, paired by round."""
    return {
        f"{a}/{b}": median_ratio(y / x for x, y in zip(seconds[a], seconds[b], strict=True))
        for a, b in permutations(seconds, 2)
    }


def ratio_keys(pairs: Mapping[str, Ratio]) -> dict[str, dict]:
    """Return the keys `ratios` and `ratio_intervals` of a bench's result."""
    return {
        "ratios": {pair: ratio.value for pair, ratio in pairs.items()},
        "ratio_intervals": {pair: [ratio.low, ratio.high] for pair, ratio in pairs.items()},
    }


def spread(name: str, seconds: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Return the median and its interval as `name`, `name_low` and `name_high`."""
    timing = Timing(tuple(seconds))
    return {
        name: scale * timing.median_s,
        f"{name}_low": scale * timing.low_s,
        f"{name}_high": scale * timing.high_s,
    }


def rate(seconds: Sequence[float], tokens: float = 1.0) -> dict[str, float]:
    """Return `tok_s`, `tok_s_low` and `tok_s_high` of runs of `tokens` tokens."""
    timing = Timing(tuple(seconds))
    bounds = {"tok_s": timing.median_s, "tok_s_low": timing.high_s, "tok_s_high": timing.low_s}
    return {key: tokens / bound for key, bound in bounds.items()}


def render(result: Mapping, headline: str, columns: Mapping[str, str]) -> str:
    """Return a result as text: headline, table of the arms, and ratios above 1.

    `headline` is a format of the result's keys, and `columns` maps each header to a
    format of an arm's keys, such as "{tok_s:.1f}". A ratio below 1 is left out if its
    inverse is shown.
    """
    arms = columns_of(result["arms"], columns, "arm")
    lines = [headline.format(**result), arms, "ratios, paired by round:"]
    for pair, value in result["ratios"].items():
        low, high = result["ratio_intervals"][pair]
        first, _, second = pair.partition("/")
        if value >= 1 or f"{second}/{first}" not in result["ratios"]:
            lines.append(f"  {pair}: {value:.2f} [{low:.2f}, {high:.2f}]")
    return "\n".join(lines)
