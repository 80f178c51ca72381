"""Prompts for training a draft: many, varied, and none of what is evaluated."""

import re

import pytest

from labkit.errors import BadRequest
from labkit.lab.texts import humaneval, mmlu
from labkit.lab.texts.invented_tasks import invented_tasks
from labkit.lab.texts.prompt_kinds import KINDS, prompts
from labkit.lab.texts.training_prompts import training_prompts


def runs(text: str, length: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


@pytest.fixture(scope="module")
def asked():
    return {
        kind: training_prompts(kind, count, seed=1)
        for kind, count in (("chat", 2800), ("code", 760), ("edit", 520))
    }


def test_chat_prompts_are_all_different_and_come_from_many_wordings(asked):
    texts = [prompt.text for prompt in asked["chat"]]
    assert len(set(texts)) == 2800
    assert len({tuple(text.split()[:3]) for text in texts}) > 150
    assert max(map(len, texts)) < 1000


@pytest.mark.real_model  # the task sets come with the same pull as the model
def test_no_wording_of_an_evaluated_prompt_is_trained_on(asked):
    """Five words in a row are the same nowhere; nor ten in code, where signatures look alike."""
    chat = set().union(*(runs(prompt.text, 5) for prompt in asked["chat"]))
    for kind in sorted(set(KINDS) - {"humaneval"}):
        for prompt in prompts(kind):
            assert not runs(prompt.text.split("\n\n")[0], 5) & chat, prompt.text
    everything = set().union(*(runs(prompt.text, 10) for held in asked.values() for prompt in held))
    for problem in humaneval():
        assert not runs(problem.prompt + problem.canonical_solution, 10) & everything, (
            problem.task_id
        )
    for item in mmlu():
        assert not runs(f"{item.question} {item.rationale}", 10) & everything, item.id


def test_the_examples_of_invented_tasks_are_true():
    """Each docstring's example is what a function of that description returns: checked by hand for a few."""
    joined = "\n".join(invented_tasks(400, seed=3))
    assert len(set(invented_tasks(400, seed=3))) > 390
    assert "count_even" in joined and ">>> " in joined and "Example: " in joined
    for task in invented_tasks(800, seed=3):
        compile(task + "    pass\n", "task", "exec")
        shown = re.search(r">>> sum_of_even\((\[.*?\])\)\n\s+(-?\d+)", task)
        if shown:
            assert sum(x for x in eval(shown[1]) if x % 2 == 0) == int(shown[2])


def test_the_seed_decides_and_a_kind_must_be_known():
    assert (
        training_prompts("chat", 5, seed=2)
        == training_prompts("chat", 5, seed=2)
        != training_prompts("chat", 5, seed=3)
    )
    with pytest.raises(BadRequest, match="'poetry'"):
        training_prompts("poetry", 1)
