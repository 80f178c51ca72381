"""Notebook 03, choosing what to lose: KL, the rule of four, a step of GPTQ, and spending bits."""

from __future__ import annotations

from itertools import product
from math import isclose, log

from labkit_course.checks.check import attempt, check, guess

# Three parts of one size: loss at so many bits. The budget is 15 bits over the three.
LOSSES = {
    "attention": {3: 0.30, 4: 0.10, 8: 0.01},
    "gate_up": {3: 0.22, 4: 0.12, 8: 0.02},
    "down": {3: 0.90, 4: 0.25, 8: 0.01},
}
BUDGET = 15


@check("KL of two distributions")
def check_kl(function) -> str | None:
    """Check `function(p, q) -> nats`: the sum of p (log p - log q)."""
    cases = (
        ([0.7, 0.2, 0.1], [0.3, 0.4, 0.3]),
        ([0.9, 0.1, 0.0], [0.6, 0.3, 0.1]),
        ([0.2, 0.8], [0.2, 0.8]),
    )
    for p, q in cases:
        try:
            value = float(attempt(function, list(p), list(q)))
        except ValueError:
            return "you took the log of 0; a token with p = 0 adds nothing, so leave it out."
        terms = [(a, b) for a, b in zip(p, q) if a > 0]
        right = sum(a * (log(a) - log(b)) for a, b in terms)
        back = sum(b * (log(b) - log(a)) for a, b in terms if b > 0)
        if isclose(value, right, abs_tol=1e-6):
            continue
        said = f"for p = {p}, q = {q} you return {value:.4g}. "
        if value != value:
            return said + "0 * log 0 is NaN on a computer; leave out tokens with p = 0."
        mistakes = {
            back: "That is the other direction; p, the unchanged model, comes first.",
            right / log(2): "That is in bits; use the natural logarithm.",
            -right: "The sign is wrong; it is log p - log q.",
            sum((abs(a - b) for a, b in zip(p, q))): (
                "That is the sum of differences; KL weighs *log*-differences by p."
            ),
        }
        return said + next(
            (w for wrong, w in mistakes.items() if isclose(value, wrong, rel_tol=1e-4)),
            "Sum p * (log p - log q).",
        )
    return None


@check("The rule of four")
def check_rule_of_four(kl) -> str | None:
    """Check the KL at 6 bits by the rule, if 4 bits lose 0.24 nats."""
    mistakes = {
        0.06: "That is one bit more; add two.",
        0.12: "A bit halves the *step*; the loss is proportional to its square.",
        3.84: "That is the wrong direction; more bits lose less.",
    }
    return guess(
        kl,
        0.24 / 16,
        mistakes,
        "Each bit halves the step and quarters the loss: divide by 4, twice.",
    )


@check("One step of GPTQ")
def check_compensate(function) -> str | None:
    """Check `function(w, H) -> float`.

    It returns the second weight after the first was rounded to a whole number.
    """
    cases = (
        ([0.7, 0.4], [[2.0, 1.0], [1.0, 4.0]]),
        ([1.4, -0.3], [[1.0, 0.9], [0.9, 1.0]]),
        ([0.7, 0.4], [[3.0, 0.0], [0.0, 1.0]]),
    )
    for w, H in cases:
        value = float(attempt(function, list(w), [list(row) for row in H]))
        change = round(w[0]) - w[0]
        right = w[1] - change * H[0][1] / H[1][1]
        if isclose(value, right, abs_tol=1e-6):
            continue
        mistakes = {
            w[1]: (
                "You did not change the second weight. If its input correlates with the first, "
                "it can compensate for the first."
            ),
            w[1] + change * H[0][1] / H[1][1]: (
                "The sign is wrong; the second weight moves *against* the change of the first."
            ),
            w[1] - change * H[0][1] / H[0][0]: (
                "Divide by H[1][1], the weight of the second weight's own error."
            ),
            w[1] - change: (
                "That is the first weight's change with the other sign; it is right only if both inputs are equal."
            ),
            float(round(right)): "Do not round the second weight yet.",
        }
        words = next(
            (w_ for wrong, w_ in mistakes.items() if isclose(value, wrong, abs_tol=1e-6)), None
        )
        return f"for w = {w}, H = {H} you return {value:.4g}. " + (
            words or "Set the derivative of d^T H d by d[1] to 0."
        )
    return None


@check("Spending bits")
def check_spend(bits) -> str | None:
    """Check {part: bits} of the smallest total loss with at most 15 bits for three parts."""
    if not isinstance(bits, dict) or set(bits) != set(LOSSES):
        return f"Give a dictionary with a number of bits for each of {', '.join(LOSSES)}."
    if not all(value in LOSSES[part] for part, value in bits.items()):
        return "Give each part 3, 4 or 8 bits; only these were measured."
    if sum(bits.values()) > BUDGET:
        return f"That takes {sum(bits.values())} bits; use at most {BUDGET}."

    def loss(choice) -> float:
        return sum(LOSSES[part][value] for part, value in choice.items())

    every = (dict(zip(LOSSES, choice)) for choice in product((3, 4, 8), repeat=len(LOSSES)))
    best = min((choice for choice in every if sum(choice.values()) <= BUDGET), key=loss)
    if isclose(loss(bits), loss(best)):
        return None
    if bits["down"] != 8:
        return f"That loses {loss(bits):.2f}. Find the part for which 8 bits instead of 4 save the most."
    return f"That loses {loss(bits):.2f}; {loss(best):.2f} is possible. If one part has 8 bits, the others get 4 and 3."
