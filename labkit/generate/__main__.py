"""Compare plain, cached and speculative decoding: the same tokens at different speeds.

    python -m labkit.generate            a random tiny model
    python -m labkit.generate FOLDER     a model's folder or GGUF file

The drafter is a minimal one. It proposes the tokens that followed the last two tokens
at their previous occurrence. `labkit.speculate` has better ones.
"""

from __future__ import annotations

import sys
from typing import Any

from labkit.errors import BadRequest
from labkit.generate import Draft, Drafter, generate
from labkit.model.load import load
from labkit.model.tiny import tiny_model

PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"


class TwoTokens(Drafter):
    """Draft what followed the last two tokens before; nothing if they are new."""

    name = "two_tokens"

    def propose(self, rows, limits):
        return [Draft(self.follow(row.history, limit)) for row, limit in zip(rows, limits)]

    def follow(self, text: list[int], limit: int) -> list[int]:
        for end in range(len(text) - 1, 1, -1):
            if text[end - 2 : end] == text[-2:]:
                return text[end : end + limit]
        return []


def main(arguments: list[str]) -> int:
    """Print a line for each way of decoding."""
    if len(arguments) > 1 or arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0 if len(arguments) == 1 else 2
    try:
        model = load(arguments[0]) if arguments else tiny_model()
    except BadRequest as error:
        print(error, file=sys.stderr)
        return 2
    prompt = PROMPT if model.tokenizer else [5, 6, 7] * 3
    ways: dict[str, dict[str, Any]] = {
        "plain": {"cache": "none"},
        "cached": {},
        "speculative": {"drafter": TwoTokens()},
    }
    first: Any = None
    print(f"{model.name}: 128 greedy tokens; each pass reads all weights once")
    for name, options in ways.items():
        generate(model, prompt, max_new_tokens=4, **options)  # warm-up
        done: Any = generate(model, prompt, max_new_tokens=128, end_ids=(), **options)
        first = first or done
        speed = (len(done.tokens) - 1) / (done.token_times_s[-1] - done.token_times_s[0])
        passes = done.tally.target_passes or len(done.tokens) - 1
        same = "yes" if done.tokens == first.tokens else "no"
        print(f"{name:<12} {speed:8.1f} tok/s   {passes:4d} passes   same tokens: {same}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
