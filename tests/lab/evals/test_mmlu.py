"""MMLU in three ways of scoring: prompts, shots, margins and mass, and errors of items."""

from __future__ import annotations

import math

import pytest
import torch

from labkit.errors import BadRequest
from labkit.lab.evals import mmlu as task_file
from labkit.lab.evals.likelihood import NotScorable, Reader
from labkit.lab.evals.mmlu import MMLU, best, generated_letter
from labkit.lab.evals.report import results
from labkit.lab.evals.task import run
from labkit.lab.texts.tasks import MMLUItem

ITEMS = tuple(
    MMLUItem(
        "rivers",
        i,
        f"Which river number {i} is long?",
        ("Nile", f"Rhine {i}", "Loïre", "Po"),
        "ABCD"[i % 4],
    )
    for i in range(5)
) + (MMLUItem("trees", 0, "Which tree?", ("oak", "ash", "fir", "elm"), "B"),)


@pytest.fixture(autouse=True)
def own_items(monkeypatch):
    monkeypatch.setattr(task_file, "mmlu", lambda language: ITEMS)


def text_of(model, parts) -> str:
    return model.tokenizer.decode(parts.context)


def test_the_prompt_of_each_way_of_scoring(byte_model):
    reader, item = Reader(byte_model), ITEMS[1]
    header = "The following are multiple choice questions (with answers) about rivers.\n\n"
    parts, held, _ = MMLU().prompt(reader, item, listed=False)
    assert text_of(byte_model, parts) == f"{header}Question: {item.question}\nAnswer:"
    assert [byte_model.tokenizer.decode(t) for t in parts.tails] == [
        " Nile",
        " Rhine 1",
        " Loïre",
        " Po",
    ]
    assert byte_model.tokenizer.decode(parts.context[:held]) == header
    parts, _, _ = MMLU().prompt(reader, item, listed=True)
    assert text_of(byte_model, parts).endswith("A. Nile\nB. Rhine 1\nC. Loïre\nD. Po\nAnswer:")
    assert [byte_model.tokenizer.decode(t) for t in parts.tails] == [" A", " B", " C", " D"]


@pytest.mark.parametrize("shots", range(5))
def test_an_item_is_never_its_own_example_and_examples_are_of_its_subject(byte_model, shots):
    for item in ITEMS[:5]:
        text = text_of(byte_model, MMLU(shots).prompt(Reader(byte_model), item, listed=False)[0])
        assert (
            text.count(item.question) == 1
            and text.count("Question:") == shots + 1
            and "tree" not in text
        )
        assert text.endswith(f"Question: {item.question}\nAnswer:")
    alone = text_of(byte_model, MMLU(shots).prompt(Reader(byte_model), ITEMS[5], listed=False)[0])
    assert alone.count("Question:") == 1  # no other item of the subject


def test_a_long_prompt_loses_whole_shots_and_is_counted(make_byte_model):
    model = make_byte_model(max_positions=300)
    parts, _, shown = MMLU(4).prompt(Reader(model), ITEMS[0], listed=False)
    text = text_of(model, parts)
    assert 0 < shown["shots"] < 4 and shown["shots"] + shown["trimmed"] == 4
    assert text.startswith("The following are") and text.count("Question:") == shown["shots"] + 1
    assert text.count("\nAnswer: ") == shown["shots"] and len(parts.context) + 8 <= 300
    scores = run(MMLU(4, scoring=("text",)), model)
    row = results(MMLU(4, scoring=("text",)).metrics, "mmlu", scores)[0]
    assert row["trimmed"] == 5 and row["errors"] == 0
    small = run(MMLU(scoring=("text",)), make_byte_model(max_positions=60))
    assert all("longer than the model's context of 60" in score.error for score in small)
    with pytest.raises(BadRequest, match="None of the 6 items of mmlu could be scored"):
        results(MMLU().metrics, "mmlu", small)


def test_margins_and_mass_equal_those_of_a_plain_pass(byte_model):
    item, reader = ITEMS[2], Reader(byte_model)
    (score,) = [one for one in run(MMLU(), byte_model) if one.item == item.id]
    nats = {}
    for way, listed in (("text", False), ("letter", True)):
        parts, _, _ = MMLU().prompt(reader, item, listed)
        nats[way] = []
        for tail in parts.tails:
            log_probs = (
                byte_model(torch.tensor([[*parts.context, *tail]]))[0].double().log_softmax(-1)
            )
            at = range(len(parts.context) - 1, len(parts.context) + len(tail) - 1)
            nats[way].append(float(log_probs[list(at), list(tail)].sum()))
        assert score.value(f"{way}_mass") == pytest.approx(sum(map(math.exp, nats[way])), rel=1e-4)
    per_byte = [n / len(choice.encode()) for n, choice in zip(nats["text"], item.choices)]
    wrong = [0, 1, 3]
    assert score.value("text_margin") == pytest.approx(
        per_byte[2] - max(per_byte[i] for i in wrong), abs=1e-5
    )
    assert score.value("letter_margin") == pytest.approx(
        nats["letter"][2] - max(nats["letter"][i] for i in wrong), abs=1e-5
    )
    assert score.value("text_right") == (max(per_byte) == per_byte[2])
    assert score.details["answer"] == "C"
    signs = [
        (one.value(f"{way}_margin") > 0, one.value(f"{way}_right") == 1)
        for one in run(MMLU(), byte_model)
        for way in nats
    ]
    assert set(signs) == {(True, True), (False, False)}


def test_nan_and_equal_scores_are_an_error_and_not_an_a(byte_model):
    assert best([-3.0, -1.0, -2.0]) == 1 and best([0.5]) == 0
    for nothing in ([float("nan"), 0.0], [-1.5, -1.5, -1.5, -1.5]):
        with pytest.raises(NotScorable):
            best(nothing)
    with torch.no_grad():
        byte_model.head.weight[:] = 0  # every token is as likely as any other
    equal = run(MMLU(scoring=("letter",)), byte_model)
    assert all("equal" in score.error and not score.metrics for score in equal)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (" B", "B"),
        ("\n(C) because", "C"),
        ("D.", "D"),
        ("The answer is A", "A"),
        ("Apples", None),
        ("", None),
        ("A's", None),
        ("E", None),
        ("**Answer:** C", "C"),
        ("Antwort:\n\nAntwort: B", "B"),
        ("The answer is 'B'", "B"),
        ("A is right", "A"),
        ("It is A because", "A"),
        ("A. Nile", "A"),
        ("A\nbecause", "A"),
        ("คำตอบคือB", "B"),
        ("उत्तर C है", "C"),
        ("A resposta correta é C", "C"),
        ("A good choice is B.", "B"),
        ("A good choice", None),
        ("A is wrong, D is right", "D"),
        ("C ist falsch, B stimmt", "B"),
        ("B est fausse, C", "C"),
        ("Bücher", None),
        ("Dänemark", None),
        ("Células", None),
        ("Déjà", None),
        ("D’accord", None),
        ("C'est vrai", None),
        ("Ação", None),
        ("C\u0327a va", None),
        ("DŽ", None),
        ("B12", None),
        ("D-Mark", None),
    ],
)
def test_the_letter_in_a_generated_text(text, letter):
    assert generated_letter(text) == letter


def test_generated_answers_equal_plain_greedy_decoding(byte_model):
    from labkit.generate import generate

    task = MMLU(scoring=("generated",))
    for score, item in zip(run(task, byte_model), task.items()):
        parts, _, _ = task.prompt(Reader(byte_model), item, listed=True)
        assert (
            score.details["written"]
            == generate(byte_model, list(parts.context), max_new_tokens=8).text
        )
    assert {metric.name for metric in task.metrics} == set(score.metrics)


def test_neither_batch_nor_order_changes_a_record(byte_model, tmp_path):
    task = MMLU(shots=2, scoring=("text", "letter", "generated"))
    whole = {
        score.item: score for score in run(task, byte_model, tmp_path / "whole.jsonl", batch=100)
    }
    one = {score.item: score for score in run(task, byte_model, batch=1)}
    backwards = {score.item: score for score in task.score(byte_model, task.items()[::-1])}
    assert whole == one == backwards


def test_a_limit_takes_items_of_as_many_subjects_as_possible():
    assert {item.subject for item in MMLU(limit=2).items()} == {"rivers", "trees"}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"shots": 5}, "0 to 4"),
        ({"scoring": ("words",)}, "'words'"),
        ({"languages": ("xx",)}, "'xx'"),
        ({"scoring": ()}, "text, letter"),
    ],
)
def test_invalid_options_raise(options, word):
    with pytest.raises(BadRequest, match=word):
        MMLU(**options)
