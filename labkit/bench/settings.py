"""TTFT and TPOT over settings of batch and prompt length, measured beside what was predicted.

A setting is `batch` equal prompts of `prompt_tokens` tokens that are answered with `new_tokens` tokens each. All
settings are run in turns, round by round, the first round apart. Seconds of a prediction come from operator curves
of the model's shapes (`labkit.plan.predict`), never from a run of the model.
When it loses: TPOT from a dozen tokens is a mean over a dozen steps; one that was disturbed shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit.bench.lengths import random_tokens
from labkit.errors import BadRequest
from labkit.generate import generate
from labkit.measure.clock import Timing, interleave
from labkit.plan.predict import OperatorTimes, Prediction, predict
from labkit.plan.shapes import ModelShape


@dataclass(frozen=True)
class Setting:
    """How many prompts at once, and how long each is."""

    batch: int
    prompt_tokens: int

    def __str__(self) -> str:
        return f"{self.batch} × {self.prompt_tokens}"


@dataclass(frozen=True)
class Served:
    """One setting: both times, measured and predicted. TPOT is that of a row; the batch gives `batch` tokens in it."""

    setting: Setting
    ttft: Timing
    tpot: Timing
    predicted: Prediction

    def request_s(self, new_tokens: int) -> float:
        """Seconds from a prompt to the last of its `new_tokens` tokens, at the measured pace."""
        return self.ttft.median_s + (new_tokens - 1) * self.tpot.median_s

    def predicted_request_s(self, new_tokens: int) -> float:
        return self.predicted.ttft_s + (new_tokens - 1) * self.predicted.tpot_s


def serve(
    model,
    shape: ModelShape,
    times: OperatorTimes,
    settings: Sequence[Setting],
    *,
    new_tokens: int = 12,
    repeats: int = 3,
    on_round: Callable[[int], None] | None = None,
) -> list[Served]:
    """Every setting predicted, then `repeats` rounds over all of them."""
    if new_tokens < 2:
        raise BadRequest(f"{new_tokens} new tokens have no time per output token; give at least 2.")
    predicted = [
        predict(shape, times, batch=s.batch, prompt_tokens=s.prompt_tokens, new_tokens=new_tokens) for s in settings
    ]
    seen: dict[Setting, list[tuple[float, float]]] = {setting: [] for setting in settings}

    def once(setting: Setting):
        prompts = [random_tokens(model, setting.prompt_tokens, seed) for seed in range(setting.batch)]

        def call() -> None:
            row = generate(model, prompts, max_new_tokens=new_tokens, end_ids=())[0]
            seen[setting].append((row.ttft_s, row.tpot_s))

        return call

    interleave({str(s): once(s) for s in settings}, repeats=repeats, device=model.device, on_round=on_round)
    result = []
    for setting, guess in zip(settings, predicted):
        ttft, tpot = zip(*seen[setting][-repeats:])
        result.append(Served(setting, Timing(ttft), Timing(tpot), guess))
    return result
