"""Measure what drafting costs on this machine: the constants of `labkit.plan.time`.

    plain_s     seconds of one target step of one token
    verify[i]   a target pass over i + 1 tokens / a plain step; near 1 if memory-bound
    draft       c: one drafted token / a plain step
    start_s     seconds in which the drafter reads the prompt, once per text

The costs do not depend on the accepted tokens. With an alpha from some texts, they
predict the speed on others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from labkit.generate.drafter import Draft, Drafter
from labkit.generate.loop import Batch, forward
from labkit.generate.request import Options, prepare
from labkit.generate.row import Row
from labkit.generate.verify import verify_greedy
from labkit.lab.measure.clock import interleave, time_once
from labkit.plan.time import SpeculationCosts, speculative_speedup

SIZES = (1, 2, 3, 4, 5, 7, 9, 13)


@dataclass(frozen=True)
class MeasuredCosts:
    """The costs of one target, and of each drafter by name."""

    plain_s: float
    verify: tuple[float, ...]
    draft_s: dict[str, float]
    start_s: dict[str, float]

    def of(self, drafter: str) -> SpeculationCosts:
        return SpeculationCosts(self.draft_s[drafter] / self.plain_s, self.verify)

    def predicted_s(self, drafter: str, alpha: float, length: int, tokens: int) -> float:
        """Return the predicted seconds for `tokens` tokens after the first."""
        speedup = speculative_speedup(alpha, length, self.of(drafter))
        return self.start_s[drafter] + tokens * self.plain_s / speedup


def measure_costs(
    target,
    drafters: Mapping[str, Drafter],
    prompt: str | Sequence[int],
    *,
    length: int = 4,
    repeats: int = 9,
    sizes: Sequence[int] = SIZES,
) -> MeasuredCosts:
    """Time target passes of several sizes and the drafts of each drafter after `prompt`.

    Decoding is greedy, and the timed calls are interleaved. `sizes` are tokens per target
    pass, and `length` is the number of tokens per draft.
    """
    budget = repeats + 2 + length + max(sizes)
    states: list = []
    batch = Batch(prepare(target, prompt, Options(max_new_tokens=budget, end_ids=())))
    last = batch.begin(states)[0].id
    calls: dict = {n: _pass(target, batch.cache, [last] * n) for n in sizes}
    start_s = {}
    for name, drafter in drafters.items():
        request = prepare(target, prompt, Options(max_new_tokens=budget, end_ids=()))
        own = request.rows[0]  # it grows by one token per step
        own.history.append(last)
        drafter.check(target)
        drafter.share(None)
        with torch.inference_mode():
            drafter.begin(request, [own], states if drafter.wants_hidden else None)
        calls[name] = _step(drafter, own, length, states[0][-1:], target.config.vocab_size)
        # The first draft also reads the prompt; later ones do not.
        start_s[name] = time_once(calls[name], target.device)
    timings = interleave(calls, repeats=repeats, device=target.device)
    seconds = {key: timing.median_s for key, timing in timings.items()}
    plain = seconds[sizes[0]]
    verify = np.interp(range(1, max(sizes) + 1), sizes, [seconds[n] / plain for n in sizes])
    return MeasuredCosts(
        plain,
        tuple(verify.tolist()),
        {name: seconds[name] / length for name in drafters},
        {name: max(0.0, start_s[name] - seconds[name]) for name in drafters},
    )


def _pass(target, cache, tokens: Sequence[int]) -> Callable[[], None]:
    length, draft = cache.length, Draft(tokens[1:])

    def call() -> None:
        with torch.inference_mode():
            verify_greedy(forward(target, cache, [tokens], last_only=False), [draft])
        cache.rewind(length)

    return call


def _step(drafter: Drafter, row: Row, length: int, state, vocabulary: int) -> Callable[[], None]:
    def call() -> None:
        with torch.inference_mode():
            drafter.propose([row], [length])
            row.history.append(
                len(row.history) % vocabulary
            )  # so that look-up finds no repeated text
            drafter.observe([0], [state] if drafter.wants_hidden else None)

    return call
