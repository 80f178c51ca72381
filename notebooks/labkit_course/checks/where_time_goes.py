"""Notebook 00, where the time goes: four numbers that a roofline answers, and the mistakes that change them."""

from __future__ import annotations

from labkit.plan.time import money_per_million_tokens
from labkit_course.checks.check import attempt, check, guess

WEIGHTS, TOKENS = 8_000_000_000, 1000  # a model in bf16, and its prompt
BANDWIDTH, FLOPS = 300e9, 60e12  # a made-up accelerator: bytes/s, operations/s


@check("Fastest decoding")
def check_decode_limit(tokens_per_s) -> str | None:
    """Most tok/s of one sequence: 8,000,000,000 weights in bf16 at 300 GB/s, cache left aside."""
    right = BANDWIDTH / (2 * WEIGHTS)
    mistakes = {
        1 / right: "That is seconds a token; tokens a second are asked for.",
        2 * right: "You read one byte a weight; bf16 takes 2.",
        right / 2: "You read 4 bytes a weight; bf16 takes 2.",
        FLOPS / (2 * WEIGHTS): (
            "That is the limit of the arithmetic. One sequence reads every weight for a "
            "single multiplication: the memory is slower."
        ),
        BANDWIDTH / 2**30 / (2 * WEIGHTS / 1e9): "You mixed GB (1000³) and GiB (1024³).",
    }
    return guess(
        tokens_per_s,
        right,
        mistakes,
        "Each token reads every weight once: bandwidth / bytes of the weights.",
    )


@check("First token")
def check_first_token(seconds) -> str | None:
    """Least seconds of a prefill of 1,000 tokens: 8,000,000,000 weights at 60 TFLOP/s, attention left aside."""
    right = 2 * WEIGHTS * TOKENS / FLOPS
    mistakes = {
        right / 2: "Factor two: a multiplication and an addition for each weight and token.",
        2 * WEIGHTS / FLOPS: "That is one token; the prompt has 1,000.",
        2 * WEIGHTS / BANDWIDTH: (
            "That is the time to read the weights once. It is the shorter one here; the "
            "arithmetic decides."
        ),
        TOKENS * 2 * WEIGHTS / BANDWIDTH: (
            "You read the weights anew for each token. A prefill uses each weight for all "
            "tokens while it is there."
        ),
        right * 1000: "That is in milliseconds; seconds are asked for.",
        1 / right: "That is prefills a second; seconds are asked for.",
    }
    return guess(
        seconds,
        right,
        mistakes,
        "Operations: 2 for each weight and token; divide by 60e12 a second.",
    )


@check("The batch at the ridge")
def check_ridge_batch(batch) -> str | None:
    """The batch at which a bf16 decode step takes as long for arithmetic as for its weights: 300 GB/s, 60 TFLOP/s."""
    right = FLOPS / BANDWIDTH
    mistakes = {
        1 / right: "Upside down: operations a second over bytes a second.",
        2 * right: (
            "Factor two: each weight takes 2 bytes *and* 2 operations a row, so they cancel."
        ),
        right / 2: (
            "Factor two: each weight takes 2 bytes *and* 2 operations a row, so they cancel."
        ),
        right * 1000: "60 TFLOP/s are 60,000 GFLOP/s: check the powers of ten.",
        right / 1000: "60 TFLOP/s are 60,000 GFLOP/s: check the powers of ten.",
    }
    return guess(
        batch,
        right,
        mistakes,
        "Set 2 · B · weights / FLOP/s equal to 2 · weights / bandwidth, and solve for B.",
    )


@check("Price of a million tokens")
def check_price(function) -> str | None:
    """`function(price_per_hour, batch, tpot_s) -> price`: of a million output tokens on a machine always busy."""
    for price, batch, tpot in ((1.0, 1, 0.05), (3.0, 16, 0.08)):
        value = attempt(function, price, batch, tpot)
        right = money_per_million_tokens(price, batch / tpot)
        mistakes = {
            right * batch: "The batch is missing: `batch` tokens come out of each step.",
            right * batch * batch: (
                "You multiplied by the batch: more sequences make a token cheaper."
            ),
            right * 3600: "The price is per hour, and the time in seconds: 3,600 of them.",
            right * 60: "An hour has 3,600 seconds, not 60.",
            right / 1e6: "That is one token; a million are asked for.",
            price / 3600 * batch / tpot * 1000000.0: (
                "Multiply by the seconds a token takes; do not divide."
            ),
        }
        wrong = guess(
            value,
            right,
            mistakes,
            "Price of a second, times seconds of a step, over its tokens, times a million.",
        )
        if wrong:
            return (
                f"for {price} an hour, batch {batch}, TPOT {tpot} s you return {value:.4g}. {wrong}"
            )
    return None
