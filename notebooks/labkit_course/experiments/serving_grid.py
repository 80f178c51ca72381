"""Measure TTFT and TPOT over a grid of batch and prompt length, next to predictions.

A setting is `batch` equal prompts of `prompt_tokens` tokens, answered with `new_tokens` tokens
each. All settings are interleaved, round by round, after a warm-up round. Predictions come from
operator curves of the model's shapes (`labkit.lab.plan.operator_times`), never from the model.
Limitation: TPOT from a dozen tokens is a mean over a dozen steps; one disturbed step shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit.errors import BadRequest
from labkit.generate import generate
from labkit.lab.measure.clock import Timing, interleave
from labkit.lab.plan.operator_times import OperatorTimes, Prediction, predict
from labkit.plan.shapes import ModelShape
from labkit_course.experiments.cache_or_not import random_tokens


@dataclass(frozen=True)
class Setting:
    """The number of prompts at once, and their length."""

    batch: int
    prompt_tokens: int

    def __str__(self) -> str:
        return f"{self.batch} × {self.prompt_tokens}"


@dataclass(frozen=True)
class Served:
    """One setting: both times, measured and predicted. TPOT is per row."""

    setting: Setting
    ttft: Timing
    tpot: Timing
    predicted: Prediction

    def request_s(self, new_tokens: int) -> float:
        """Return seconds from a prompt to its last new token, at the measured pace."""
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
    """Predict every setting, then run `repeats` rounds over all of them."""
    if new_tokens < 2:
        raise BadRequest(f"new_tokens is {new_tokens}; a time per output token needs at least 2.")
    predicted = [
        predict(shape, times, batch=s.batch, prompt_tokens=s.prompt_tokens, new_tokens=new_tokens)
        for s in settings
    ]
    seen: dict[Setting, list[tuple[float, float]]] = {setting: [] for setting in settings}

    def once(setting: Setting):
        prompts = [
            random_tokens(model, setting.prompt_tokens, seed) for seed in range(setting.batch)
        ]

        def call() -> None:
            row = generate(model, prompts, max_new_tokens=new_tokens, end_ids=())[0]
            seen[setting].append((row.ttft_s, row.tpot_s))

        return call

    interleave(
        {str(s): once(s) for s in settings}, repeats=repeats, device=model.device, on_round=on_round
    )
    result = []
    for setting, guess in zip(settings, predicted):
        ttft, tpot = zip(*seen[setting][-repeats:])
        result.append(Served(setting, Timing(ttft), Timing(tpot), guess))
    return result
