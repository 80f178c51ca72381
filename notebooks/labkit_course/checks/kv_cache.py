"""Notebook 01, the KV cache: positions, bytes, what fits, and one cache for two answers."""

from __future__ import annotations

from labkit.plan.kv import KVShape, kv_bytes_per_token
from labkit_course.checks.check import attempt, check, guess

_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
# Invented: no two mistakes give the same number. Older configurations omit keys, or say null.
CONFIGS = (
    dict(zip(_KEYS, (36, 2880, 40, 8, 128))),
    dict(zip(_KEYS, (24, 1536, 12, 3))),
    dict(zip(_KEYS, (10, 640, 8))),
    dict(zip(_KEYS, (10, 640, 8, None))),
)


@check("Bytes per token")
def check_bytes_per_token(function) -> str | None:
    """Check `function(config) -> int`: bytes per token of the KV cache in bf16."""
    for config in CONFIGS:
        try:
            value = attempt(function, dict(config))
        except (KeyError, TypeError) as error:
            return _missing_key(config, error)
        mistake = _bytes_mistake(config, value)
        if mistake:
            return f"for {config} you return {value}. {mistake}"
    return None


def _missing_key(config: dict, error: Exception) -> str:
    absent = {"head_dim", "num_key_value_heads"} - {key for key, value in config.items() if value}
    return (
        f"your function raised {type(error).__name__} ({error}) where {' and '.join(sorted(absent))} is absent or "
        "null. Older configurations omit them: then every query head has its own keys and values, and "
        "head_dim is hidden_size / num_attention_heads."
    )


def _bytes_mistake(config: dict, value) -> str | None:
    layers, hidden, heads = (
        config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    kv_heads = config.get("num_key_value_heads") or heads
    derived = hidden // heads
    head_dim = config.get("head_dim") or derived
    right = kv_bytes_per_token(KVShape.uniform(layers, kv_heads, head_dim), "bf16")
    mistakes = {
        2 * layers * hidden * 2: (
            "That is the formula with hidden_size. It is right if each query head has its own "
            "keys and values, and too large for a model with fewer KV heads."
        ),
        2 * layers * heads * head_dim * 2: "You counted query heads (num_attention_heads). Only "
        "num_key_value_heads are stored.",
        2 * layers * (heads // kv_heads) * head_dim * 2: (
            "You used the number of query heads that *share* a KV head. Use the number of KV heads."
        ),
        2 * layers * kv_heads * derived * 2: (
            "You used hidden_size / num_attention_heads as head_dim. This configuration "
            "has a head_dim; use it."
        ),
        right // 2: (
            "That is half of the right number. Count both K and V, and 2 bytes per bf16 number."
        ),
        right // 4: (
            "That is a quarter of the right number. Count both K and V, and 2 bytes per bf16 number."
        ),
        right * 2: "That is twice the right number; a bf16 number takes 2 bytes, not 4.",
        right // layers: "That is one layer. Each layer has its own keys and values.",
    }
    if isinstance(value, float) and value == right:
        return "The number is right, but bytes are whole: return an int (// instead of /)."
    return guess(
        value, right, mistakes, "It should be 2 (K and V) x layers x KV heads x head_dim x 2 bytes."
    )


@check("Positions computed")
def check_positions(without_cache, with_cache) -> str | None:
    """Check how many token positions a model computes, without and with a cache.

    The prompt has 500 tokens, and 100 are generated.
    """
    prompt, new = 500, 100
    wrong = guess(
        without_cache,
        sum(prompt + step for step in range(new)),
        {
            prompt * new: (
                "Without a cache: the text grows by one token per step; you used 500 in each."
            ),
            (prompt + new) * new: (
                "Without a cache: not every step sees all 600 tokens; the first sees 500."
            ),
            sum(prompt + step for step in range(1, new + 1)): (
                "Without a cache: the first new token comes from a pass over 500 tokens, not 501."
            ),
            prompt + new: (
                "Without a cache: that counts each position once. Each step computes the "
                "whole text again."
            ),
        },
        "Without a cache: step i computes the prompt and i new tokens; add the 100 steps.",
    )
    return wrong or guess(
        with_cache,
        prompt + new - 1,
        {
            prompt + new: ("With the cache: the model never reads the last token, so subtract 1."),
            new: "With the cache: the prompt must be computed once too.",
            new - 1: "With the cache: the prompt must be computed once too.",
        },
        "With the cache: count the prompt once, then one position per step after the first new token.",
    )


class _Counted:
    """A model that counts the tokens that it computes."""

    def __init__(self, model):
        self._model = model
        self.tokens = 0

    def __call__(self, tokens, *arguments, **options):
        self.tokens += tokens.numel()
        return self._model(tokens, *arguments, **options)

    def __getattr__(self, name):
        return getattr(self._model, name)


@check("One prompt, two answers")
def check_two_answers(function) -> str | None:
    """Check `function(model, prompt, first, second, new_tokens) -> (tokens, tokens)`.

    Both answers are greedy, and the prompt is computed once.
    """
    import torch

    from labkit.model.tiny import tiny_model

    model, new = tiny_model(seed=1), 5
    prompt, first, second = [5, 9, 2, 7, 11, 3], [21, 4], [8, 30, 17]

    def greedy(text: list[int]) -> list[int]:
        made = []
        for _ in range(new):
            made.append(int(model(torch.tensor([[*text, *made]]))[0, -1].argmax()))
        return made

    want = (greedy(prompt + first), greedy(prompt + second))
    carried = (
        greedy(prompt + first + want[0][:-1] + second),
        greedy(prompt + first + want[0] + second),
    )
    counted = _Counted(model)
    answers = attempt(function, counted, list(prompt), list(first), list(second), new)
    got = tuple([int(token) for token in answer] for answer in answers)
    if [len(answer) for answer in got] != [new, new]:
        return f"You return {[len(answer) for answer in got]} tokens; return two answers of {new} new tokens."
    if got[0] != want[0]:
        return "The first answer differs from decoding without a cache: take the logits of the *last* position."
    if got[1] in carried and got[1] != want[1]:
        return "The second answer has read the first question too: rewind the cache to the end of the prompt."
    if got[1] != want[1]:
        return "The second answer differs from decoding without a cache: rewind to exactly len(prompt)."
    return _computed_too_much(counted.tokens, len(prompt), len(first) + len(second), new)


def _computed_too_much(computed: int, prompt: int, questions: int, new: int) -> str | None:
    allowed = prompt + questions + 2 * new  # feeding the last token of each answer is forgiven
    if computed <= allowed:
        return None
    if computed <= allowed + prompt:
        return f"The tokens are right, but {computed} positions were computed; compute the prompt only once."
    return f"The tokens are right, but {computed} positions were computed and {allowed} are enough; feed only new tokens."


@check("What fits")
def check_what_fits(tokens) -> str | None:
    """Check the maximum number of tokens of one sequence in 16 GiB.

    8e9 weights of 2 bytes; a KV cache of 32 layers x 8 KV heads x 128 in bf16.
    """
    memory, weights, per_token = 16 * 2**30, 8_000_000_000 * 2, 2 * 32 * 8 * 128 * 2
    mistakes = {
        memory // per_token: (
            "You forgot the weights; they take 16,000,000,000 bytes of the memory."
        ),
        (16 * 10**9 - weights) // per_token: (
            "You used 1000³ bytes per GiB; a GiB has 1024³ bytes."
        ),
        (memory - weights) // (2 * 32 * 32 * 128 * 2): (
            "You counted 32 query heads; 8 KV heads are stored."
        ),
        (memory - weights) // (per_token // 2): "Factor two: K and V are both stored.",
        -(-(memory - weights) // per_token): "You rounded up; the last token does not fit.",
        (memory - 16 * 2**30) // per_token: (
            "You used 16 GiB for the weights; 8,000,000,000 x 2 B are 14.9 GiB."
        ),
    }
    otherwise = (
        "Subtract the weights from the memory, in bytes, and divide by the bytes of one token."
    )
    return guess(tokens, (memory - weights) // per_token, mistakes, otherwise)
