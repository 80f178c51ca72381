"""What drafting costs on this machine, in plain steps: the constants of `labkit.plan.time`, measured one by one.

    plain_s       one target step of one token
    verify[i]     a target pass over i + 1 tokens / a plain step        few tokens cost little where reading weights decides
    draft         c: one drafted token / a plain step
    start_s       the drafter's first look at the prompt, once a text

Nothing here looks at what is accepted: with alpha from some texts these predict the speed on others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from labkit.generate.loop import forward, make_cache, prefill
from labkit.generate.request import prepare
from labkit.generate.sampling import Sampling
from labkit.generate.verify import verify_greedy
from labkit.measure.clock import interleave, time_once
from labkit.plan.time import SpeculationCosts
from labkit.speculate.draft import Drafter

SIZES = (1, 2, 3, 4, 5, 7, 9, 13)


@dataclass(frozen=True)
class MeasuredCosts:
    """Of one target, and of each drafter by its name in the call."""

    plain_s: float
    verify: tuple[float, ...]
    draft_s: dict[str, float]
    start_s: dict[str, float]

    def of(self, drafter: str) -> SpeculationCosts:
        return SpeculationCosts(self.draft_s[drafter] / self.plain_s, self.verify)

    def predicted_s(self, drafter: str, alpha: float, length: int, tokens: int) -> float:
        """Seconds for `tokens` tokens after the first."""
        from labkit.plan.time import speculative_speedup

        return self.start_s[drafter] + tokens * self.plain_s / speculative_speedup(alpha, length, self.of(drafter))


def measure_costs(target, drafters: Mapping[str, Drafter], prompt: str | Sequence[int], *, length: int = 4, repeats: int = 9,
                  sizes: Sequence[int] = SIZES) -> MeasuredCosts:  # fmt: skip
    """All of it after `prompt`, greedy, every part in turns. `length`: tokens a draft that is timed."""
    request, row = _asked(target, prompt, repeats + 2 + length + max(sizes))
    states: list = []
    cache = make_cache(request, [row])
    prefill(request, [row], cache, states)
    held = len(row.prompt)
    calls = {tokens: _pass(target, cache, row.history[-1:] * tokens, held) for tokens in sizes}
    start_s = {}
    for name, drafter in drafters.items():
        request, own = _asked(target, prompt, repeats + 2 + length + max(sizes))  # each sees a text that grows by one token a step
        drafter.check(target)
        drafter.share(None)
        with torch.inference_mode():
            drafter.begin(request, [own], states if drafter.wants_hidden else None)
        calls[name] = _step(drafter, own, length, states[0][-1:], target.config.vocab_size)
        # What the first draft takes beyond a later one is reading the prompt.
        start_s[name] = time_once(calls[name], target.device)
    timings = interleave(calls, repeats=repeats, device=target.device)
    seconds = {key: timing.median_s for key, timing in timings.items()}
    plain = seconds[sizes[0]]
    known = {tokens: seconds[tokens] / plain for tokens in sizes}
    verify = tuple(_between(known, tokens) for tokens in range(1, max(sizes) + 1))
    return MeasuredCosts(plain, verify, {name: seconds[name] / length for name in drafters},
                         {name: max(0.0, start_s[name] - seconds[name]) for name in drafters})  # fmt: skip


def _asked(target, prompt, tokens: int):
    """A request of `tokens` tokens, and its row as it is when the first token is known."""
    request = prepare(target, prompt, max_new_tokens=tokens, sampling=Sampling(), end_ids=(), stop=(), cache="contiguous",
                      cancel=None, prefill_chunk=None, texts=False)  # fmt: skip
    row = request.rows[0]
    row.history.append(row.history[-1])
    return request, row


def _pass(target, cache, tokens: Sequence[int], length: int):
    def call() -> None:
        with torch.inference_mode():
            verify_greedy(forward(target, cache, [tokens], last_only=False), [tokens[1:]])
        cache.rewind(length)

    return call


def _step(drafter: Drafter, row, length: int, state, vocabulary: int):
    def call() -> None:
        with torch.inference_mode():
            drafter.propose([row], [length])
            row.history.append(len(row.history) % vocabulary)  # nothing that could be looked up
            drafter.observe([0], [state] if drafter.wants_hidden else None)

    return call


def _between(known: Mapping[int, float], tokens: int) -> float:
    """Straight lines between the sizes that were timed."""
    below = max(size for size in known if size <= tokens)
    above = min(size for size in known if size >= tokens)
    if below == above:
        return known[below]
    return known[below] + (known[above] - known[below]) * (tokens - below) / (above - below)
