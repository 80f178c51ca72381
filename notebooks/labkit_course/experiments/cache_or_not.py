"""Measure decoding with and without a cache over the length of the text: the first lesson.

`step_times` times one decode step after S tokens: without a cache a pass over S tokens, with
one a pass over a single token that reads S keys and values. `answer_times` times a prompt with
its whole answer, and `growth` the time after each token of a long answer. All arms are
interleaved. The tokens are random, because the time of a dense model does not depend on them.
`predicted_steps` and `predicted_clock` predict the results from operator curves of the shapes
(`labkit.lab.plan.operator_times`), not from the model.
Limitation: below about 6 repeats the interval is the whole range.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from labkit.errors import BadRequest
from labkit.generate import generate
from labkit.lab.measure.clock import Timing, interleave
from labkit.lab.plan.operator_times import OperatorTimes, step_parts
from labkit.plan.shapes import ModelShape

WITHOUT, WITH = "no cache", "cache"
ARMS = {WITHOUT: "none", WITH: "contiguous"}


def predicted_steps(
    shape: ModelShape, times: OperatorTimes, lengths: Sequence[int]
) -> dict[str, list[float]]:
    """Return {arm: [seconds of one step at each length]}."""
    return {
        WITHOUT: [sum(step_parts(shape, times, 1, length, 0).values()) for length in lengths],
        WITH: [sum(step_parts(shape, times, 1, 1, length - 1).values()) for length in lengths],
    }


def predicted_clock(
    shape: ModelShape, times: OperatorTimes, prompt_tokens: int, new_tokens: int
) -> dict[str, list[float]]:
    """Return {arm: [seconds since the start, at each new token]}; both arms begin with a prefill."""
    steps = predicted_steps(shape, times, range(prompt_tokens, prompt_tokens + new_tokens))
    steps[WITH][0] = steps[WITHOUT][0]
    return {name: list(accumulate(seconds)) for name, seconds in steps.items()}


def random_tokens(model, count: int, seed: int = 0) -> list[int]:
    if count < 1:
        raise BadRequest(f"The text has {count} tokens; give at least 1.")
    source = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (count,), generator=source).tolist()


@torch.inference_mode()
def step_times(
    model,
    lengths: Sequence[int],
    *,
    repeats: int = 3,
    on_length: Callable[[int], None] | None = None,
):
    """Return {arm: [Timing of one step at each length]}: the step behind a text of S tokens."""
    result: dict[str, list[Timing]] = {name: [] for name in ARMS}
    for length in lengths:
        text = torch.tensor([random_tokens(model, length)], device=model.device)
        cache = model.new_cache(capacity=length)
        model(text, cache, last_only=True)

        def cached_step(cache=cache, text=text):
            cache.rewind(
                text.shape[1] - 1
            )  # the newest token is the one that is not in the cache yet
            model(text[:, -1:], cache, last_only=True)

        def fresh_step(text=text):
            model(text, last_only=True)

        timings = interleave(
            {WITHOUT: fresh_step, WITH: cached_step}, repeats=repeats, device=model.device
        )
        for name, timing in timings.items():
            result[name].append(timing)
        if on_length is not None:
            on_length(length)
    return result


def answer_times(
    model, prompt_tokens: int, new_tokens: int, *, repeats: int = 3
) -> dict[str, Timing]:
    """Return {arm: Timing} of a whole answer: prefill and all its tokens."""
    prompt = random_tokens(model, prompt_tokens)
    calls = {
        name: (lambda kind=kind: _answer(model, prompt, new_tokens, kind))
        for name, kind in ARMS.items()
    }
    return interleave(calls, repeats=repeats, device=model.device)


def growth(
    model, prompt_tokens: int, new_tokens: int, *, repeats: int = 1
) -> dict[str, list[tuple]]:
    """Return {arm: [(median, low, high) seconds since the start, at each token]} of one answer."""
    prompt = random_tokens(model, prompt_tokens)
    clocks: dict[str, list[tuple[float, ...]]] = {name: [] for name in ARMS}
    for _ in range(repeats):
        for name, kind in ARMS.items():
            clocks[name].append(_answer(model, prompt, new_tokens, kind).token_times_s)
    return {
        name: [(statistics.median(at), min(at), max(at)) for at in zip(*runs)]
        for name, runs in clocks.items()
    }


def _answer(model, prompt: list[int], new_tokens: int, kind: str):
    return generate(model, prompt, max_new_tokens=new_tokens, end_ids=(), cache=kind)
