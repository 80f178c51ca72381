"""Notebook 04, what it costs: the smallest difference, a test of flips, and scores that can fall."""

from __future__ import annotations

from math import comb, isclose

from labkit_course.checks.check import attempt, check, guess

# right, items, chance, and the low end of the share's 95 % interval
SCORES = {
    "mmlu, letter": (13, 57, 0.25, 0.138),
    "mmlu, text": (71, 281, 0.25, 0.205),
    "structured, prefers": (58, 90, 0.5, 0.541),
    "humaneval": (4, 164, 0.0, 0.010),
}
FLIPS = 6  # the fewest that a fair coin rarely throws all alike


@check("The smallest difference")
def check_smallest(points) -> str | None:
    """Check the smallest difference, in points, that 164 problems can show: six flips."""
    mistakes = {
        5 / 164 * 100: (
            "Five equal coins happen by chance once in sixteen times, which is too often for 95 %."
        ),
        1 / 164 * 100: "One flip is one toss of a coin; it shows nothing.",
        2.0: "That is the claim. How many flips must there be before a fair coin is rejected?",
        6 / 164: "Give points: multiply by 100.",
    }
    return guess(
        points, 6 / 164 * 100, mistakes, "The least n with 2 / 2**n < 0.05, over 164, times 100."
    )


@check("Are the flips a fair coin?")
def check_flips(function) -> str | None:
    """Check `function(fell, rose) -> p`: the exact two-sided p value."""
    for fell, rose in ((9, 2), (6, 0), (5, 0), (2, 9), (4, 4), (0, 0), (12, 5)):
        value = float(attempt(function, fell, rose))
        n, least = fell + rose, min(fell, rose)
        tail = sum(comb(n, k) for k in range(least + 1)) / 2**n
        right = min(1.0, 2 * tail)
        if isclose(value, right, abs_tol=1e-9):
            continue
        said = f"for {fell} that fell and {rose} that rose you return {value:.4g}. "
        if isclose(value, tail, abs_tol=1e-9):
            return said + "That is one side; double it, because the other side is as unlikely."
        if isclose(value, 2 * tail, abs_tol=1e-9):
            return said + "A probability is at most 1."
        if isclose(value, comb(n, least) / 2**n, abs_tol=1e-9):
            return (
                said + "That is the probability of this split; add those of the more uneven splits."
            )
        return (
            said
            + "Take twice the sum of comb(n, k) / 2**n for k up to the smaller count, at most 1."
        )
    return None


@check("Which scores can fall?")
def check_can_fall(names) -> str | None:
    """Check the names of SCORES for which these items could show a fall to chance."""
    if isinstance(names, str) or not set(names) <= set(SCORES):
        return f"Give a set of names from {', '.join(SCORES)}."
    for name, (right, n, chance, low) in SCORES.items():
        able = low > chance and right - chance * n >= FLIPS
        if able and name not in names:
            return (
                f"{name} can: its interval begins above chance, by {right - chance * n:.0f} items."
            )
        if not able and name in names:
            if low <= chance:
                return f"{name} cannot: its interval begins at {low:.1%} and includes chance, {chance:.0%}."
            return f"{name} cannot: only {right} items are right, and fewer than {FLIPS} flips show nothing."
    return None
