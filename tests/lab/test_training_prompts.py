"""Prompts for training a draft are many and varied, and no evaluation contains them."""

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
def prompts_by_kind():
    return {
        kind: training_prompts(kind, count, seed=1)
        for kind, count in (("chat", 2800), ("code", 760), ("edit", 520))
    }


def test_chat_prompts_are_all_different_and_come_from_many_wordings(prompts_by_kind):
    texts = [prompt.text for prompt in prompts_by_kind["chat"]]
    assert len(set(texts)) == 2800
    assert len({tuple(text.split()[:3]) for text in texts}) > 150
    assert max(map(len, texts)) < 1000


@pytest.mark.real_model  # the task sets are downloaded with the model
def test_no_evaluated_wording_is_in_the_training_prompts(prompts_by_kind):
    """Compare runs of five words, or of ten words in code, where signatures look alike."""
    chat = set().union(*(runs(prompt.text, 5) for prompt in prompts_by_kind["chat"]))
    for kind in sorted(set(KINDS) - {"humaneval"}):
        for prompt in prompts(kind):
            assert not runs(prompt.text.split("\n\n")[0], 5) & chat, prompt.text
    everything = set().union(
        *(runs(one.text, 10) for some in prompts_by_kind.values() for one in some)
    )
    for problem in humaneval():
        assert not runs(problem.prompt + problem.canonical_solution, 10) & everything, (
            problem.task_id
        )
    for item in mmlu():
        assert not runs(f"{item.question} {item.rationale}", 10) & everything, item.id


def test_the_examples_of_invented_tasks_are_correct():
    """Compute the example of one task again, and compile all tasks."""
    joined = "\n".join(invented_tasks(400, seed=3))
    assert len(set(invented_tasks(400, seed=3))) > 390
    assert "count_even" in joined and ">>> " in joined and "Example: " in joined
    for task in invented_tasks(800, seed=3):
        compile(task + "    pass\n", "task", "exec")
        shown = re.search(r">>> sum_of_even\((\[.*?\])\)\n\s+(-?\d+)", task)
        if shown:
            assert sum(x for x in eval(shown[1]) if x % 2 == 0) == int(shown[2])


def test_the_seed_sets_the_prompts_and_an_unknown_kind_is_an_error():
    assert (
        training_prompts("chat", 5, seed=2)
        == training_prompts("chat", 5, seed=2)
        != training_prompts("chat", 5, seed=3)
    )
    with pytest.raises(BadRequest, match="'poetry'"):
        training_prompts("poetry", 1)
