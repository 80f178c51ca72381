"""The checks of notebook 08: right answers pass, and each mistake is named."""

import re

import pytest
import torch

from labkit_course.checks import make_a_draft as ex


def influence(before, after):
    return 1 - torch.cosine_similarity(before, after, -1).mean()


def by_fours(key):
    def function(weights):
        out = []
        for at in range(0, len(weights), 4):
            four = weights[at : at + 4]
            kept = sorted(range(4), key=lambda i: -key(four[i]))[:2]
            out += [w if i in kept else 0.0 for i, w in enumerate(four)]
        return out

    return function


def half_of_all(weights):
    kept = sorted(range(len(weights)), key=lambda i: -abs(weights[i]))[: len(weights) // 2]
    return [w if i in kept else 0.0 for i, w in enumerate(weights)]


def test_right_answers_pass():
    assert (
        ex.check_influence(influence)
        and ex.check_draft_worth(1.4507)
        and ex.check_two_of_four(by_fours(abs))
    )


@pytest.mark.parametrize(
    ("check", "answer", "named"),
    [
        (ex.check_influence, lambda a, b: torch.cosine_similarity(a, b, -1).mean(), "1 minus it"),
        (
            ex.check_influence,
            lambda a, b: (1 - torch.cosine_similarity(a, b, -1)).sum(),
            "added the tokens",
        ),
        (
            ex.check_influence,
            lambda a, b: influence(a.flatten()[None], b.flatten()[None]),
            "one cosine over all tokens",
        ),
        (ex.check_influence, lambda a, b: influence(a, b - a), "not the change"),
        (ex.check_influence, lambda a, b: (b - a).norm(dim=-1).mean(), "length of the change"),
        (ex.check_influence, lambda a, b: 0.5, "mean over tokens"),
        (ex.check_draft_worth, 2.176, "divide by the cost"),
        (ex.check_draft_worth, 1.813, "0.1 each"),
        (ex.check_draft_worth, 1.674, "three steps"),
        (ex.check_draft_worth, 1.36, "target's own"),
        (ex.check_draft_worth, 7.253, "add it"),
        (ex.check_draft_worth, 0.784, "start the sum at 1"),
        (ex.check_draft_worth, 1.8667, "all before it"),
        (ex.check_draft_worth, 3, "Divide"),
        (ex.check_two_of_four, lambda w: w, "nothing was set"),
        (
            ex.check_two_of_four,
            lambda w: [x for x in by_fours(abs)(w) if x],
            "stay in their places",
        ),
        (ex.check_two_of_four, by_fours(lambda x: x), "compare sizes"),
        (ex.check_two_of_four, half_of_all, "every four neighbours"),
        (ex.check_two_of_four, by_fours(lambda x: -abs(x)), "two of largest size"),
    ],
)
def test_each_mistake_is_named(check, answer, named, capsys):
    assert not check(answer)
    assert re.search(named, capsys.readouterr().out)
