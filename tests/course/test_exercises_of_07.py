"""The checks of notebook 07: right answers pass, and each mistake is named."""

import pytest

from labkit_course.checks import guess_and_verify as ex
from labkit_course.show.draft_plots import coloured


def draft(text, limit):
    for place in range(len(text) - 1, 0, -1):
        if text[place - 1] == text[-1]:
            return text[place : place + limit]
    return []


def test_right_answers_pass():
    assert ex.check_refused([0.75, 0.25, 0.0]) and ex.check_tokens_a_pass(2.952)
    assert ex.check_break_even(0.4) and ex.check_best_length(1) and ex.check_own_drafter(draft)


@pytest.mark.parametrize(
    ("check", "answer", "named"),
    [
        (ex.check_refused, [0.3, 0.1, 0.0], "sum to 1"),
        (ex.check_refused, [0.5, 0.3, 0.2], "p itself"),
        (ex.check_refused, [0.625, 0.375, 0.0], "subtract the draft"),
        (ex.check_refused, [1.0, 0.0], "three words"),
        (ex.check_tokens_a_pass, 1.952, "target itself adds"),
        (ex.check_tokens_a_pass, 3.4, "multiply"),
        (ex.check_break_even, 0.3, "also costs more"),
        (ex.check_break_even, 0.1, "cost of the draft"),
        (ex.check_best_length, 2, "Compare"),
        (
            ex.check_own_drafter,
            lambda text, limit: text[text.index(text[-1]) + 1 :][:limit],
            "first occurrence",
        ),
        (ex.check_own_drafter, lambda text, limit: [*draft(text, 9)], "at most 2"),
        (ex.check_own_drafter, lambda text, limit: [], "answer is"),
    ],
)
def test_the_message_names_the_mistake(check, answer, named, capsys):
    assert not check(answer)
    assert named in capsys.readouterr().out


def test_coloured_text_is_escaped_and_says_who_said_what():
    html = coloured(["a<b", "\n", "c"], [True, False, True], "An edit")
    assert (
        "a&lt;b" in html
        and "2 of 3 tokens were drafted" in html
        and html.count("border-bottom") == 2
    )
