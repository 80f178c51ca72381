"""Notebook 08, make a draft: a layer's influence, the gain of a better draft, and 2:4 sparsity."""

from __future__ import annotations

import torch

from labkit_course.checks.check import attempt, check, guess


@check("A layer's influence")
def check_influence(function) -> str | None:
    """Check `function(before [T, E], after [T, E]) -> number`: 1 - the mean cosine of tokens."""
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(5, 8, generator=generator)
    after = before + 0.7 * torch.randn(5, 8, generator=generator)
    cosines = torch.cosine_similarity(before, after, -1)
    right = float(1 - cosines.mean())
    value = float(attempt(function, before, after))
    mistakes = {
        float(cosines.mean()): (
            "That is the mean cosine, which is large if a layer changes *little*; take 1 minus it."
        ),
        float((1 - cosines).sum()): (
            "You added the tokens; take their mean, so that the length of the text does not matter."
        ),
        float(1 - torch.cosine_similarity(before.flatten(), after.flatten(), 0)): (
            "You took one cosine over all tokens, so that long vectors decide; take one per "
            "token, then the mean."
        ),
        float(1 - torch.cosine_similarity(before, after - before, -1).mean()): (
            "The second vector is the one *after* the layer, not the change."
        ),
        float((after - before).norm(dim=-1).mean()): (
            "That is the length of the change; use the cosine, which measures the angle."
        ),
    }
    return guess(
        value,
        right,
        mistakes,
        "Divide each token's dot product by both lengths; then take 1 minus the mean over tokens.",
    )


@check("What a better draft is worth")
def check_draft_worth(ratio) -> str | None:
    """Check the speed-up for alpha 0.6, three drafted tokens and c = 0.1.

    A verify pass over four tokens costs 1.2 plain steps.
    """
    tokens = 1 + 0.6 + 0.36 + 0.216
    mistakes = {
        tokens: "Those are the tokens of a pass; divide by the cost of the pass.",
        tokens / 1.2: "The three drafted tokens cost 0.1 each; add them to the verify pass.",
        tokens / 1.3: "The draft takes three steps of 0.1, not one.",
        tokens / (1.2 + 0.4): "Three tokens are drafted; the fourth is the target's own.",
        tokens / 0.3: "The target's pass over four tokens costs 1.2 plain steps; add it.",
        (tokens - 1) / 1.5: "The target's own token counts too; start the sum at 1.",
        (1 + 3 * 0.6) / 1.5: (
            "A token is accepted only if all before it were: 0.6, then 0.6², then 0.6³."
        ),
    }
    return guess(ratio, tokens / 1.5, mistakes, "Divide (1 + α + α² + α³) by (3 c + 1.2).")


@check("Two of four")
def check_two_of_four(function) -> str | None:
    """Check `function(weights) -> list`: in every four, the two of smallest size are 0."""
    for weights in (
        [0.1, -3.0, 2.0, 0.5],
        [5.0, -6.0, 0.1, 7.0, 1.0, 2.0, -3.0, 0.2],
        [-1.0, -2.0, -3.0, -4.0],
    ):
        right = []
        for at in range(0, len(weights), 4):
            kept = sorted(range(at, at + 4), key=lambda i: -abs(weights[i]))[:2]
            right += [weights[i] if i in kept else 0.0 for i in range(at, at + 4)]
        value = [float(number) for number in attempt(function, list(weights))]
        if value != right:
            return _fours_mistake(weights, value)
    return None


def _fours_mistake(weights: list[float], value: list[float]) -> str:
    if len(value) != len(weights):
        return f"you return {len(value)} numbers for {len(weights)}; zeros stay in their places."
    if value == weights:
        return "nothing was set to zero."
    by_value = []
    for at in range(0, len(weights), 4):
        four = sorted(weights[at : at + 4])[2:]
        by_value += [w if w in four else 0.0 for w in weights[at : at + 4]]
    if value == by_value:
        return "you kept the largest numbers; compare sizes, because -3 matters more than 0.5."
    half = sorted(map(abs, weights))[len(weights) // 2 :]
    if value == [w if abs(w) in half else 0.0 for w in weights]:
        return "you took the smallest half of all weights; choose two in every four neighbours."
    return (
        f"for {weights} you return {value}; of each four neighbours, keep the two of largest size."
    )
