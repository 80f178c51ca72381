"""Evaluation text is not in the calibration or training text, and the task sets are complete."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import yaml

from labkit.errors import BadRequest
from labkit.lab import texts
from labkit.lab.texts import library, tasks

pulled = pytest.mark.real_model  # the task sets are downloaded with the model

PARTS = ("evaluation", "calibration", "training")


def audit(items=None):
    """Return {problem: [item ids]} for the published English items."""
    items = tasks._english() if items is None else items
    subjects = Counter(item.subject for item in items)
    questions = Counter((item.language, item.subject, item.question) for item in items)
    # "\frac" in a string that was unescaped: "\f" became white space.
    broken_tex = re.compile(r"\n(?:actorial|rac\b|rac\{|ightarrow)|\t(?:imes|heta)|\x0c|\x08")
    leaked = re.compile(r"\b[Hh]ence it is (?:not )?true\b")
    tests = {
        "no readable letter": lambda item: item.answer is None,
        "not four choices": lambda item: len(item.choices) != 4,
        "equal choices": lambda item: len(set(item.choices)) < len(item.choices),
        "asked twice": lambda i: questions[i.language, i.subject, i.question] > 1,
        "rationale inside the question": lambda item: leaked.search(item.question),
        "broken LaTeX": lambda item: broken_tex.search(item.question + item.rationale),
    }
    problems = {name: [item.id for item in items if test(item)] for name, test in tests.items()}
    small = sorted(name for name, count in subjects.items() if count < 5)
    return problems | {"subject with fewer than five": small}


def runs(text: str, length: int) -> set[tuple[str, ...]]:
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return {tuple(lines[i : i + length]) for i in range(len(lines) - length + 1)}


@pytest.fixture(scope="module")
def evaluated():
    return {kind: texts.evaluation_text(kind) for kind in texts.EVALUATION_SLICES}


# The split


def test_no_file_is_in_two_parts():
    for kind in ("code", "prose"):
        parts = [set(library.names(kind, part)) for part in PARTS]
        assert all(parts) and sum(map(len, parts)) == len(set().union(*parts))
    # The code of a file and its docstrings are in the same part.
    for part in PARTS:
        assert set(library.names("code", part)) <= set(library.names("prose", part))


@pulled
@pytest.mark.parametrize("kind", ["code", "prose"])
@pytest.mark.parametrize("part", ["calibration", "training"])
def test_no_run_of_lines_is_shared_with_evaluation(kind, part, evaluated):
    forbidden = set().union(*(runs(text, library.RUN) for text in evaluated.values()))
    assert len(forbidden) > 5_000
    text = "\n".join(document.text for document in library.documents(kind, part, seed=3))
    assert len(text) > 200_000
    assert not runs(text, library.RUN) & forbidden


def test_shared_runs_exist_and_are_removed():
    """Show that the parts share runs before the removal, so the test above can fail."""
    topics = [name for name in library.names("prose", "training") if name.startswith("topics/")]
    raw = set().union(*(runs(library._raw("prose", name), library.RUN) for name in topics))
    evaluated = set().union(
        *(runs(doc.text, library.RUN) for doc in texts.evaluation_documents("prose"))
    )
    assert raw & evaluated
    shared = "\n".join(f"line {i}" for i in range(library.RUN))
    forbidden = set(library._runs(shared))
    assert library.without_runs(f"before\n{shared}\nafter", forbidden) == "before\nafter"
    assert library.without_runs(shared.replace("line 3", "line x"), forbidden) == shared.replace(
        "line 3", "line x"
    )


def test_only_the_name_decides_the_part():
    assert library.part_of("library/pickle.py") == "evaluation"  # a change would mix the parts
    assert library.part_of("library/json/decoder.py") == "training"
    shares = Counter(library.part_of(f"library/module_{i}.py") for i in range(5000))
    assert 400 < shares["evaluation"] < 600 and 400 < shares["calibration"] < 600


def test_the_seed_changes_only_the_order():
    first = texts.calibration_text("code", seed=0, characters=50_000)
    assert first == texts.calibration_text("code", seed=0, characters=50_000)
    assert first != texts.calibration_text("code", seed=1, characters=50_000)
    whole = [
        sorted(doc.name for doc in texts.documents("code", "calibration", seed)) for seed in (0, 1)
    ]
    assert whole[0] == whole[1]


def test_a_text_has_the_asked_length_and_whole_lines():
    text = texts.calibration_text("prose", characters=20_000)
    assert 15_000 < len(text) <= 20_000 and text.endswith("\n")


def test_unknown_kinds_are_errors():
    with pytest.raises(BadRequest, match="'poems'.*'code' or 'prose'"):
        texts.calibration_text("poems")
    with pytest.raises(BadRequest, match="'poems'.*reasoning"):
        texts.evaluation_text("poems")
    with pytest.raises(BadRequest, match="'xx'"):
        texts.mmlu("xx")


# The tasks


@pulled
def test_humaneval_has_all_its_problems():
    problems = texts.humaneval()
    assert [problem.task_id for problem in problems] == [f"HumanEval/{i}" for i in range(164)]
    for problem in problems:
        assert f"def {problem.entry_point}(" in problem.prompt and "def check(" in problem.test
        compile(problem.prompt + problem.canonical_solution, problem.task_id, "exec")


@pulled
def test_mmlu_has_the_known_problems_and_no_others():
    items = tasks._english()
    assert len(items) == 282 and len(texts.mmlu()) == 281
    assert len({item.subject for item in items}) == 57 and len({item.id for item in items}) == 282
    problems = audit()
    assert (
        problems["no readable letter"] == problems["not four choices"] == ["en/college_chemistry/3"]
    )  # five choices, (E)
    assert problems["subject with fewer than five"] == [
        "college_chemistry",
        "formal_logic",
        "human_aging",
    ]
    assert problems["rationale inside the question"] == ["en/abstract_algebra/1"]
    assert problems["asked twice"] == ["en/college_physics/0", "en/college_physics/3"]
    assert problems["equal choices"] == ["en/high_school_biology/0"]
    assert len(problems["broken LaTeX"]) == 7
    for item in texts.mmlu():
        assert item.question and item.rationale and item.answer in "ABCD" and all(item.choices)
        assert f"The answer is ({item.answer})" in item.rationale


@pulled
def test_the_translations_are_complete():
    for language in texts.LANGUAGES[1:]:
        items = texts.mmlu(language)
        assert len(items) == 285 and len({item.subject for item in items}) == 57
        assert all(
            len(item.choices) == 4 and item.answer in "ABCD" and item.question for item in items
        )
    german = next(
        item
        for item in texts.mmlu("de")
        if item.subject == "abstract_algebra" and "Rings 2Z" in item.question
    )
    assert german.answer_text == "0"


@pulled
def test_an_item_is_not_its_own_example():
    items = texts.mmlu()
    for item in items:
        shots = tasks.few_shot(item, items)
        assert len(shots) in (2, 3, 4) and all(shot.subject == item.subject for shot in shots)
        assert item.question not in {shot.question for shot in shots}  # nor a copy of it
    assert tasks.few_shot(items[0], items, 2, seed=1) == tasks.few_shot(items[0], items, 2, seed=1)
    assert tasks.few_shot(items[0], items, 0) == []


def test_an_item_is_parsed_from_its_prompt():
    item = tasks.parse(
        "physics",
        2,
        "What is f(a)?\n(A) 1 (B) two (2) (C) 3\n(D) 4\nA: Let's think. The answer is (B).",
    )
    assert item.choices == ("1", "two (2)", "3", "4") and item.answer_text == "two (2)"
    assert item.question == "What is f(a)?" and item.id == "en/physics/2"
    unreadable = tasks.parse(
        "physics", 3, "Q\n(A) 1 (B) 2 (C) 3 (D) 4 (E) 5\nA: The answer is (E)."
    )
    assert unreadable.answer is None and len(unreadable.choices) == 5


def test_yaml_cannot_run_functions():
    assert tasks._read_yaml("a: 1\nb: !function os.getcwd\n") == {"a": 1, "b": None}
    with pytest.raises(yaml.YAMLError):
        tasks._read_yaml("c: !!python/object/apply:os.getcwd []\n")
