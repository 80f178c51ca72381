"""Notebook 00, where the time goes: four numbers from a roofline."""

from __future__ import annotations

from labkit.plan.time import money_per_million_tokens
from labkit_course.checks.check import attempt, check, guess

WEIGHTS, TOKENS = 8_000_000_000, 1000  # a model in bf16, and its prompt
BANDWIDTH, FLOPS = 300e9, 60e12  # a made-up accelerator: bytes/s, operations/s


@check("Fastest decoding")
def check_decode_limit(tokens_per_s) -> str | None:
    """Check the maximum tok/s of one sequence: 8e9 weights in bf16 at 300 GB/s, without the cache."""
    right = BANDWIDTH / (2 * WEIGHTS)
    mistakes = {
        1 / right: "That is seconds per token; give tokens per second.",
        2 * right: "You read one byte per weight; bf16 takes 2.",
        right / 2: "You read 4 bytes per weight; bf16 takes 2.",
        FLOPS / (2 * WEIGHTS): (
            "That is the limit of the arithmetic. One sequence reads every weight for one "
            "multiplication, so the memory is slower."
        ),
        BANDWIDTH / 2**30 / (2 * WEIGHTS / 1e9): "You mixed GB (1000³) and GiB (1024³).",
    }
    return guess(
        tokens_per_s,
        right,
        mistakes,
        "Each token reads every weight once, so divide bandwidth by the bytes of the weights.",
    )


@check("First token")
def check_first_token(seconds) -> str | None:
    """Check the minimum seconds of a prefill of 1,000 tokens.

    8e9 weights at 60 TFLOP/s, without attention.
    """
    right = 2 * WEIGHTS * TOKENS / FLOPS
    mistakes = {
        right / 2: "Count 2 operations per weight and token: a multiplication and an addition.",
        2 * WEIGHTS / FLOPS: "That is one token; the prompt has 1,000.",
        2 * WEIGHTS / BANDWIDTH: (
            "That is the time to read the weights once. The arithmetic takes longer here, so it "
            "decides."
        ),
        TOKENS * 2 * WEIGHTS / BANDWIDTH: (
            "You read the weights again for each token. A prefill reads each weight once for all "
            "tokens."
        ),
        right * 1000: "That is in milliseconds; give seconds.",
        1 / right: "That is prefills per second; give seconds.",
    }
    return guess(
        seconds,
        right,
        mistakes,
        "Count 2 operations per weight and token, and divide by 60e12 per second.",
    )


@check("The batch at the ridge")
def check_ridge_batch(batch) -> str | None:
    """Check the batch at which arithmetic takes as long as reading the weights.

    A decode step in bf16 at 300 GB/s and 60 TFLOP/s.
    """
    right = FLOPS / BANDWIDTH
    mistakes = {
        1 / right: "That is the inverse; divide operations per second by bytes per second.",
        2 * right: (
            "Factor two: each weight takes 2 bytes *and* 2 operations per row, so they cancel."
        ),
        right / 2: (
            "Factor two: each weight takes 2 bytes *and* 2 operations per row, so they cancel."
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
    """Check `function(price_per_hour, batch, tpot_s) -> price` of a million output tokens.

    The machine is always busy.
    """
    for price, batch, tpot in ((1.0, 1, 0.05), (3.0, 16, 0.08)):
        value = attempt(function, price, batch, tpot)
        right = money_per_million_tokens(price, batch / tpot)
        mistakes = {
            right * batch: "The batch is missing: `batch` tokens come out of each step.",
            right * batch * batch: (
                "You multiplied by the batch; divide by it, because more sequences make a token cheaper."
            ),
            right * 3600: "The price is per hour and the time in seconds; divide by 3,600.",
            right * 60: "An hour has 3,600 seconds, not 60.",
            right / 1e6: "That is one token; give the price of a million.",
            price / 3600 * batch / tpot * 1000000.0: (
                "Multiply by the seconds per token; do not divide."
            ),
        }
        wrong = guess(
            value,
            right,
            mistakes,
            "Multiply the price of a second by the seconds of a step and a million, and divide by the batch.",
        )
        if wrong:
            return f"for {price} per hour, batch {batch}, TPOT {tpot} s you return {value:.4g}. {wrong}"
    return None
