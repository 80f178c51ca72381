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
from labkit.generate.request import Row
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
    rows = [Row(i, tuple(prompt), max_new_tokens) for i, prompt in enumerate(prompts)]
    synchronize(decoder.device)
    start = perf_counter()
    decoder.prefill(prompts)
    known, more = 0, 1
    while True:
        found = decoder.tokens(known, known + more)  # waits for the device
        time_s = perf_counter() - start
        for row, tokens in zip(rows, found):
            for token in tokens:
                if row.reason is None:
                    row.take(token, time_s, ends)
        known += more
        if all(row.reason is not None for row in rows):
            return [row.completion(decoder.model) for row in rows]
        more = min(look, max_new_tokens - known)
        decoder.run(more)
