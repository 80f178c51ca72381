"""Notebook 07, guess and verify: the rule, the formula, the break-even, and your own drafter."""

from __future__ import annotations

from collections.abc import Callable

from labkit.plan.time import (
    SpeculationCosts,
    best_draft_length,
    break_even_alpha,
    expected_accepted_length,
)
from labkit_course.checks.check import attempt, check, guess

P, Q = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6)  # target and draft over three words
ALPHA, LENGTH = 0.8, 3
COSTS = SpeculationCosts(
    0.3, (1.0, 1.1, 1.2)
)  # a drafted token; target passes over one to three tokens


@check("Keep or refuse")
def check_refused(after_refusal) -> str | None:
    """Check the distribution that is sampled after the third word was rejected.

    p = 0.5, 0.3, 0.2 and q = 0.2, 0.2, 0.6.
    """
    given = [float(value) for value in after_refusal]
    left = [max(p - q, 0.0) for p, q in zip(P, Q)]
    right = [value / sum(left) for value in left]
    if len(given) != 3:
        return f"You gave {len(given)} numbers; there are three words."
    if all(abs(a - b) < 5e-3 for a, b in zip(given, right)):
        return None
    if all(abs(a - b) < 5e-3 for a, b in zip(given, left)):
        return "That is max(p - q, 0), which does not sum to 1 yet."
    if all(abs(a - b) < 5e-3 for a, b in zip(given, P)):
        return "That is p itself. The draft's frequent words would then still be too frequent."
    if abs(given[2]) < 5e-3:
        return (
            "The third word is correct. From the other words, subtract the draft's probabilities."
        )
    return "Subtract q from p, set negative numbers to 0, and divide by the sum."


@check("Tokens a pass")
def check_tokens_a_pass(tokens) -> str | None:
    """Check the expected tokens per pass for alpha 0.8 and three drafted tokens."""
    right = expected_accepted_length(ALPHA, LENGTH)
    mistakes = {
        right - 1: ("Add the token that the target itself adds in every pass."),
        1 + ALPHA * LENGTH: (
            "Tokens after a rejected one are lost too, so the chances multiply: 0.8, 0.8², 0.8³."
        ),
        ALPHA * LENGTH: (
            "The chances multiply (0.8, 0.8², 0.8³), and the target adds one token of its own."
        ),
    }
    return guess(
        tokens,
        right,
        mistakes,
        "Add the chances that at least 0, 1, 2 and 3 drafted tokens are accepted.",
    )


@check("Worth it?")
def check_break_even(alpha) -> str | None:
    """Check the alpha above which drafting one token is faster.

    c = 0.3, and a pass over two tokens costs 1.1.
    """
    right = break_even_alpha(1, COSTS)
    mistakes = {
        0.3: "A pass over two tokens also costs more than a pass over one; count 1.1, not 1.",
        0.1: "Count the cost of the draft too: 0.3.",
        0.286: "One drafted token gives 1 + alpha tokens for 0.3 + 1.1 steps.",
    }
    return guess(alpha, right, mistakes, "Set 1 + alpha tokens against 0.3 + 1.1 steps.")


@check("How far to draft")
def check_best_length(length) -> str | None:
    """Check the best draft length up to 2 for alpha 0.5 and the same costs."""
    return guess(
        length,
        best_draft_length(0.5, COSTS, 2),
        {},
        "Compare (1 + 0.5) / (0.3 + 1.1) with (1 + 0.5 + 0.25) / (0.6 + 1.2), and with 1.",
    )


@check("A drafter of your own")
def check_own_drafter(draft: Callable) -> str | None:
    """Check `draft(text, limit)`.

    It returns at most `limit` tokens: those that followed the most recent earlier
    occurrence of the last token.
    """
    cases = [
        (([5, 1, 2, 3, 5], 2), [1, 2]),
        (([7, 1, 7, 2, 9, 7], 3), [2, 9, 7]),
        (([1, 2, 3], 4), []),
        (([4, 4], 1), [4]),
        (([6], 3), []),
    ]
    for (text, limit), right in cases:
        given = list(attempt(draft, list(text), limit))
        if given == right:
            continue
        if len(given) > limit:
            return f"For {text} you gave {len(given)} tokens; give at most {limit}."
        if given and not right:
            return f"In {text} the last token does not occur earlier; you found {given}. Is it its own match?"
        if text == [7, 1, 7, 2, 9, 7] and given[:1] == [1]:
            return "You took the first occurrence; take the most recent one."
        return f"For {text} and {limit} tokens the answer is {right}; you gave {given}."
    return None
