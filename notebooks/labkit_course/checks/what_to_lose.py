"""Notebook 03, choosing what to lose: KL, the rule of four, one step of GPTQ, and spending bits."""

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
    """`function(p, q) -> nats`: sum of p (log p - log q)."""
    cases = (
        ([0.7, 0.2, 0.1], [0.3, 0.4, 0.3]),
        ([0.9, 0.1, 0.0], [0.6, 0.3, 0.1]),
        ([0.2, 0.8], [0.2, 0.8]),
    )
    for p, q in cases:
        try:
            value = float(attempt(function, list(p), list(q)))
        except ValueError:
            return (
                "log of 0 was asked for: a token that p gives no chance adds nothing; leave it out."
            )
        terms = [(a, b) for a, b in zip(p, q) if a > 0]
        right = sum(a * (log(a) - log(b)) for a, b in terms)
        back = sum(b * (log(b) - log(a)) for a, b in terms if b > 0)
        if isclose(value, right, abs_tol=1e-6):
            continue
        said = f"for p = {p}, q = {q} you return {value:.4g}. "
        if value != value:
            return (
                said
                + "0 * log 0 is NaN to a computer and 0 in the limit: leave out tokens with p = 0."
            )
        mistakes = {
            back: "That is the other direction: p, the unchanged model, stands in front.",
            right / log(2): "That is in bits; use the natural logarithm.",
            -right: "The sign: log p - log q.",
            sum((abs(a - b) for a, b in zip(p, q))): (
                "That is the sum of differences; KL weighs *log*-differences by p."
            ),
        }
        return said + next(
            (w for wrong, w in mistakes.items() if isclose(value, wrong, rel_tol=1e-4)),
            "p * (log p - log q), summed.",
        )
    return None


@check("The rule of four")
def check_rule_of_four(kl) -> str | None:
    """KL at 6 bits where 4 bits lose 0.24 nats, by the rule."""
    mistakes = {
        0.06: "That is one bit more; two were added.",
        0.12: "A bit halves the *step*; the loss goes with its square.",
        3.84: "The wrong way: more bits lose less.",
    }
    return guess(
        kl,
        0.24 / 16,
        mistakes,
        "Each bit halves the step and quarters the loss: divide by 4, twice.",
    )


@check("One step of GPTQ")
def check_compensate(function) -> str | None:
    """`function(w, H) -> float`: the second weight after the first was rounded to a whole number."""
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
                "You left the second weight alone: where inputs go together, it can make "
                "up for the first."
            ),
            w[1] + change * H[0][1] / H[1][1]: (
                "The sign: the second weight moves *against* the first one's change."
            ),
            w[1] - change * H[0][1] / H[0][0]: (
                "Divide by H[1][1]: how much the second weight matters itself."
            ),
            w[1] - change: (
                "As much as the first moved, against it: right only where both inputs are equal."
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
    """{part: bits} of least total loss with at most 15 bits over the three parts."""
    if not isinstance(bits, dict) or set(bits) != set(LOSSES):
        return f"Give a dictionary with a number of bits for each of {', '.join(LOSSES)}."
    if not all(value in LOSSES[part] for part, value in bits.items()):
        return "Only 3, 4 and 8 bits were measured."
    if sum(bits.values()) > BUDGET:
        return f"That takes {sum(bits.values())} bits; {BUDGET} are there."

    def loss(choice) -> float:
        return sum(LOSSES[part][value] for part, value in choice.items())

    every = (dict(zip(LOSSES, choice)) for choice in product((3, 4, 8), repeat=len(LOSSES)))
    best = min((choice for choice in every if sum(choice.values()) <= BUDGET), key=loss)
    if isclose(loss(bits), loss(best)):
        return None
    if bits["down"] != 8:
        return f"That loses {loss(bits):.2f}. Look where 8 bits save most against 4 for the same price."
    return f"That loses {loss(bits):.2f}; {loss(best):.2f} is possible. With 8 bits spent, one of the others gets 4, the other 3."
