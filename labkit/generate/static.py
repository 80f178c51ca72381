"""Greedy generation over a `StaticDecoder`: the device runs ahead, and is asked only every `look` tokens whether to stop.

The same tokens as plain greedy decoding in the same dtype. A row that has ended computes on until all have, and what it said
behind its end is cut off: at most `look` - 1 steps are wasted, in exchange for one wait in `look` steps instead of one in
each. Tokens are known, and their times taken, when the device is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from labkit.errors import BadRequest
from labkit.generate.completion import Completion
from labkit.measure.clock import synchronize
from labkit.model.static_decoder import StaticDecoder

LOOK = 16


def generate_static(decoder: StaticDecoder, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = 128,
                    end_ids: Sequence[int] | None = None, look: int = LOOK) -> list[Completion]:  # fmt: skip
    """Continue prompts of token ids, one a row of `decoder`. `end_ids`: None is the model's own, () is none."""
    if max_new_tokens < 1 or look < 1:
        raise BadRequest(f"{max_new_tokens} new tokens, looked at every {look}; give at least 1 of each.")
    longest = max((len(prompt) for prompt in prompts), default=0) + max_new_tokens - 1
    if longest > decoder.cache.capacity:
        raise BadRequest(f"Prompt and answer need {longest} slots and this decoder has {decoder.cache.capacity}: make it larger.")
    ends = frozenset(decoder.model.config.eos_ids if end_ids is None else end_ids)
    synchronize(decoder.device)
    start = perf_counter()
    decoder.prefill(prompts)
    rows: list[list[int]] = [row for row in decoder.tokens(0, 1)]
    times, known = [perf_counter() - start], 1
    while known < max_new_tokens and not all(ends.intersection(row) for row in rows):
        more = min(look, max_new_tokens - known)
        decoder.run(more)
        for row, found in zip(rows, decoder.tokens(known, known + more)):
            row.extend(found)
        known += more
        times += [perf_counter() - start] * more
    return [_completion(decoder.model, prompt, row, times, ends) for prompt, row in zip(prompts, rows)]


def _completion(model, prompt, tokens: list[int], times: list[float], ends: frozenset[int]) -> Completion:
    end = next((i for i, token in enumerate(tokens) if token in ends), None)
    kept = tokens if end is None else tokens[: end + 1]
    shown = kept if end is None else kept[:-1]
    text = None if model.tokenizer is None else model.tokenizer.decode(shown)
    return Completion(tuple(prompt), tuple(kept), text, "length" if end is None else "end_token", tuple(times[: len(kept)]))
