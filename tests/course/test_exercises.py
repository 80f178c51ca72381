"""The checks pass the right answer, name the common mistakes, and never stop a run."""

import pytest
import torch

from labkit_course.checks.kv_cache import (
    check_bytes_per_token,
    check_positions,
    check_two_answers,
    check_what_fits,
)


def right(config):
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * config["num_hidden_layers"] * kv_heads * head_dim * 2


def test_the_right_answer_passes_in_one_line(capsys):
    assert check_bytes_per_token(right)
    assert check_positions(54_950, 599)
    assert check_what_fits(9_001)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(line.endswith("passed") for line in lines)


@pytest.mark.parametrize("answer", [None, ..., lambda config: ..., lambda config: None])
def test_an_untouched_exercise_is_not_a_failure(answer, capsys):
    outcome = check_bytes_per_token(answer)
    assert outcome.state == "not attempted" and not outcome
    assert "not attempted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        (lambda c: 2 * c["num_hidden_layers"] * c["hidden_size"] * 2, "formula with hidden_size"),
        (lambda c: right({**c, "num_key_value_heads": None}), "query heads"),
        (lambda c: right({**c, "head_dim": None}), "hidden_size / num_attention_heads as head_dim"),
        (lambda c: right(c) // 2, "half of the right number"),
        (lambda c: right(c) // 4, "quarter"),
        (lambda c: right(c) * 2, "takes 2 bytes, not 4"),
        (lambda c: right(c) // c["num_hidden_layers"], "one layer"),
        (lambda c: right(c) / 1, "whole"),
        (lambda c: right({**c, "head_dim": c["head_dim"]}), "head_dim is absent or null"),
        (
            lambda c: (
                2
                * c["num_hidden_layers"]
                * c["num_key_value_heads"]
                * (c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])
                * 2
            ),
            "num_key_value_heads is absent",
        ),
        (
            lambda c: right(
                {
                    **c,
                    "num_key_value_heads": c["num_attention_heads"]
                    // (c["num_key_value_heads"] or 1),
                }
            ),
            "share",
        ),
    ],
)
def test_the_message_names_the_mistake(mistake, named, capsys):
    assert not check_bytes_per_token(mistake)
    assert named in capsys.readouterr().out


@pytest.mark.parametrize(
    ("without", "with_cache", "named"),
    [
        (50_000, 599, "used 500 in each"),
        (60_000, 599, "first sees 500"),
        (55_050, 599, "not 501"),
        (600, 599, "each position once"),
        (54_950, 600, "never reads the last token"),
        (54_950, 100, "prompt must be computed once"),
        (1, 1, "add the 100 steps"),
    ],
)
def test_off_by_one_counts_of_positions_are_told_apart(without, with_cache, named, capsys):
    assert not check_positions(without, with_cache)
    assert named in capsys.readouterr().out


def test_what_fits_tells_forgotten_weights_from_query_heads(capsys):
    for wrong, named in [
        (131_072, "forgot the weights"),
        (2_250, "query heads"),
        (18_003, "K and V"),
        (9_002, "rounded up"),
    ]:
        assert not check_what_fits(wrong)
        assert named in capsys.readouterr().out


def test_code_that_raises_is_reported_not_raised(capsys):
    def broken(config):
        raise ZeroDivisionError("by zero")

    assert not check_bytes_per_token(broken)
    assert "ZeroDivisionError" in capsys.readouterr().out


def two_answers(back_to=lambda prompt: len(prompt), again=False, whole=False, extra=0):
    """The solution, and what it becomes with one mistake."""

    def answer_both(model, prompt, first, second, new_tokens):
        cache = model.new_cache()
        model(torch.tensor([prompt]), cache)
        answers = []
        for question in (first, second):
            cache.rewind(min(back_to(prompt), cache.length) if answers else len(prompt))
            text, answer = [*prompt, *question], []
            if again and answers:
                cache.rewind(0)
                question = text
            logits = model(torch.tensor([question]), cache)
            for _ in range(new_tokens + extra):
                answer.append(int(logits[0, -1].argmax()))
                if whole:
                    logits = model(torch.tensor([[*text, *answer]]))
                else:
                    logits = model(torch.tensor([answer[-1:]]), cache)
            answers.append(answer)
        return answers

    return answer_both


def test_two_answers_from_one_prompt_pass():
    assert check_two_answers(two_answers())


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        ({"back_to": lambda prompt: 1000}, "has read the first question"),
        ({"back_to": lambda prompt: len(prompt) - 1}, "exactly len(prompt)"),
        ({"again": True}, "compute the prompt only once"),
        ({"whole": True}, "feed only new tokens"),
        ({"extra": 1}, "6, 6"),
    ],
)
def test_mistakes_with_one_cache_for_two_answers_are_named(mistake, named, capsys):
    assert not check_two_answers(two_answers(**mistake))
    assert named in capsys.readouterr().out
