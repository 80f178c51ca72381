"""Compare plain, cached and speculative decoding: the same tokens at different speeds.

    python -m labkit.generate            a random tiny model
    python -m labkit.generate FOLDER     the model in a folder or GGUF file

The drafter is minimal: it proposes the tokens that followed the last two tokens at their
previous occurrence. `labkit.speculate` has better drafters.
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
    """Draft the tokens after the previous occurrence of the last two; none if they are new."""

    name = "two_tokens"

    def propose(self, rows, limits):
        drafts = []
        for text, limit in zip([row.history for row in rows], limits):
            ends = (i for i in range(len(text) - 1, 1, -1) if text[i - 2 : i] == text[-2:])
            end = next(ends, len(text))
            drafts.append(Draft(text[end : end + limit]))
        return drafts


def main(arguments: list[str]) -> int:
    """Print one line per way of decoding; return the exit status."""
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
    kind = "" if arguments else " (random and tiny; give a folder to see a real model)"
    print(f"{model.name}{kind}: 128 greedy tokens; each pass reads all weights once")
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
