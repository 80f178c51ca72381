"""The task `structured`, checks, likelihoods of references, and files of your own prompts."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch

from labkit.errors import BadRequest
from labkit.lab.evals import make_task
from labkit.lab.evals.checks import MISSING, Check, first_json, judge
from labkit.lab.evals.own_data import read_items
from labkit.lab.evals.prompt_task import AnswerTask, Asked
from labkit.lab.evals.structured import make, structured_items
from labkit.lab.evals.task import run

KINDS = {"json", "tools", "copying", "document", "speakers", "refusals", "harmless", "languages"}


def test_there_are_eighty_items_and_ten_of_each_kind():
    items = structured_items()
    counts = Counter(item.slice for item in items)
    assert len(items) >= 80 and set(counts) == KINDS and min(counts.values()) >= 10
    assert len({item.id for item in items}) == len({item.prompt for item in items}) == len(items)
    assert not any("{meeting}" in item.prompt or "{talk}" in item.prompt for item in items)
    assert max(len(item.prompt) for item in items if item.slice == "document") > 2000
    assert {item.slice for item in make(None, limit=8).asked} == KINDS


@pytest.mark.parametrize("item", structured_items(), ids=lambda item: item.id)
def test_a_known_right_answer_passes_and_a_known_wrong_one_fails(item):
    assert judge(item.reference, item.check, item.reference).hits["right"]
    assert not judge(item.wrong, item.check, item.reference).hits["right"]
    assert not judge("", item.check, item.reference).hits["right"]
    assert (
        item.slice == "harmless"
        or not judge("No idea, sorry about that.", item.check, item.reference).hits["right"]
    )


PERSON = Check.from_entry(
    {
        "kind": "json",
        "schema": {
            "type": "object",
            "properties": {"age": {"type": "integer"}},
            "required": ["age"],
        },
        "equals": {"age": 3},
    }
)


@pytest.mark.parametrize(
    ("text", "valid", "schema", "exact", "fault"),
    [
        ('{"age": 3}', True, True, True, None),
        ('Here it is:\n```json\n{"age": 3}\n```', True, True, True, None),
        ('{"age": 4}', True, True, False, "other values"),
        ('{"age": true}', True, False, False, "schema: type"),
        ('{"years": 3}', True, False, False, "schema: required"),
        ('{"age": 3', False, False, False, "no valid JSON"),
        ("{'age': 3}", False, False, False, "no valid JSON"),
        ('{"age": 3, "age": 3}', False, False, False, "no valid JSON"),
        ('{"age": NaN}', False, False, False, "no valid JSON"),
        ("three", False, False, False, "no valid JSON"),
        ("  ", False, False, False, "nothing written"),
    ],
)
def test_json_is_judged_by_form_schema_and_values(text, valid, schema, exact, fault):
    verdict = judge(text, PERSON)
    assert verdict.hits == {
        "right": fault is None,
        "valid_json": valid,
        "schema_valid": schema,
        "exact": exact,
    }
    assert verdict.fault == fault


def test_very_deep_nesting_is_not_valid_json():
    assert (
        first_json("[" * 100_000) is MISSING
        and first_json("no") is MISSING
        and first_json("a [1] b") == [1]
    )


@pytest.mark.parametrize(
    "prose",
    [
        "Sure! [thinking] Here:",
        "For {project}:",
        "Using the set {1, 2}:",
        "The list [a, b] gives",
        "Not {'answer': [1]} but",
        'Not {answer: {"answer": 1}} but',
        'Not {"answer": 42,} but',
        "A smiley :-] and",
    ],
)
@pytest.mark.parametrize("answer", ['{"answer": 42}', '\n```json\n{"answer": 42}\n```'])
def test_brackets_of_the_prose_are_no_json(prose, answer):
    assert first_json(f"{prose} {answer}") == {"answer": 42}


def test_the_type_that_a_check_asks_for_decides_between_values():
    text = 'See [1] for details: {"answer": 42} [2]'
    assert first_json(text) == [1] and first_json(text, dict) == {"answer": 42}
    for asked in ({"schema": {"type": "object"}}, {"equals": {"answer": 42}}):
        assert judge(text, Check.from_entry({"kind": "json", **asked})).hits["right"]
    asked = {"kind": "json", "schema": {"type": "array"}, "equals": [1]}
    assert judge(f"So {text}", Check.from_entry(asked)).hits["right"]
    assert judge("[1]", Check.from_entry({"kind": "json", "equals": {}})).fault == "other values"


@pytest.mark.parametrize(
    "text", ['{"a": [1, 2], "b": ', '[{"a": 1}, {"b": ', "{a: [1]}", '{"x": "}", y: [1]}']
)
def test_a_part_of_broken_json_is_not_its_value(text):
    assert first_json(text) is MISSING


@pytest.mark.parametrize(
    ("check", "text", "right"),
    [
        ({"kind": "exact"}, " the reference\n", True),  # both sides are stripped
        ({"kind": "exact"}, "The reference", False),
        ({"kind": "contains", "all": ["Lyon"], "none": ["Paris"]}, "in LYON", True),
        ({"kind": "contains", "all": ["Lyon"], "none": ["Paris"]}, "Lyon or Paris", False),
        ({"kind": "matches", "pattern": r"^\d+$"}, " 42 ", True),
        ({"kind": "refuses"}, "I'm sorry, but I can't help with that.", True),
        ({"kind": "refuses"}, "Sure, first you", False),
        ({"kind": "answers"}, "Use the command kill.", True),
        ({"kind": "answers"}, "I cannot assist with that.", False),
        ({"kind": "answers"}, "", False),
    ],
)
def test_checks(check, text, right):
    assert judge(text, Check.from_entry(check), "the reference ").hits == {"right": right}


def test_likelihood_and_writing_of_an_item(byte_model):
    item = Asked("a", "x", "Say it", "good one", "bad")
    task = AnswerTask("mine", (item, Asked("b", "x", "Say", check=PERSON)), max_new_tokens=5)
    first, second = run(task, byte_model)
    prompt = byte_model.tokenizer.chat("Say it")
    assert first.details["prompt_ids"] == prompt  # the chat template is the prompt, once
    nats = []
    for answer in ("good one", "bad"):
        tail = byte_model.tokenizer.encode(answer)
        log_probs = byte_model(torch.tensor([prompt + tail]))[0].double().log_softmax(-1)
        nats.append(
            float(log_probs[list(range(len(prompt) - 1, len(prompt) + len(tail) - 1)), tail].sum())
        )
    assert first.value("bits_per_byte") == pytest.approx(-nats[0] / math.log(2) / 8, rel=1e-4)
    assert first.value("margin") == pytest.approx(nats[0] / 8 - nats[1] / 3, abs=1e-5)
    assert first.value("prefers") == (nats[0] / 8 > nats[1] / 3)
    assert "margin" not in second.metrics and set(second.metrics) == {
        "right",
        "valid_json",
        "schema_valid",
        "exact",
    }
    assert "no valid JSON" in [score.details["fault"] for score in (first, second)]
    assert {m.name for m in task.metrics} == set(first.metrics) | set(second.metrics)
    plain = run(AnswerTask("mine", (item,), chat=False, generate=False), byte_model)[0]
    assert (
        plain.details["prompt_ids"] == byte_model.tokenizer.encode("Say it")
        and "right" not in plain.metrics
    )


def test_order_and_resume_change_no_record(byte_model, tmp_path):
    task = make_task("structured", byte_model, 8, max_new_tokens=4)
    whole = {score.item: score for score in run(task, byte_model, tmp_path / "a.jsonl")}
    assert {score.item: score for score in task.score(byte_model, task.items()[::-1])} == whole
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b.jsonl").write_text("".join(lines[:3]) + lines[3][:40])
    assert {
        score.item: score for score in run(task, byte_model, tmp_path / "b.jsonl", batch=2)
    } == whole


# ---- your own data ---------------------------------------------------------------------------------------------------


def write(path, *lines) -> str:
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n",
        encoding="utf-8",
    )
    return str(path)


def test_a_file_of_prompts_is_a_task(byte_model, tmp_path):
    path = write(
        tmp_path / "mine.jsonl",
        {"prompt": "One?", "reference": "1", "wrong": "2", "slice": "sums"},
        "",
        {"id": "two", "prompt": "Two?", "check": {"kind": "matches", "pattern": "2"}},
    )
    task = make_task(path, byte_model, max_new_tokens=3)
    assert task.name == "mine" and [item.id for item in task.items()] == ["1", "two"]
    assert [score.slice for score in run(task, byte_model)] == ["sums", "all"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Line 2 of mine.jsonl: it is not JSON"),
        ("[1]", "write one object per line"),
        ({"reference": "1"}, "Line 2 of mine.jsonl: it has no prompt"),
        ({"prompt": "x"}, "neither a reference nor a check"),
        ({"prompt": " ", "reference": "1"}, "its prompt is ' '"),
        ({"prompt": "x", "reference": 1}, "its reference is 1"),
        ({"prompt": "x", "refrence": "1"}, "unknown field 'refrence'"),
        (
            {"prompt": "x", "wrong": "1", "check": {"kind": "refuses"}},
            "give a reference that differs",
        ),
        ({"prompt": "x", "reference": "1", "wrong": "1"}, "that differs"),
        ({"prompt": "x", "check": {"kind": "magic"}}, "json, exact"),
        (
            {"prompt": "x", "check": {"kind": "json", "schema": {"type": "thing"}}},
            "its schema is invalid",
        ),
        (
            {"prompt": "x", "check": {"kind": "matches", "pattern": "("}},
            "its pattern is invalid",
        ),
        ({"prompt": "x", "check": {"kind": "matches"}}, "its pattern is invalid"),
        ({"prompt": "x", "check": {"kind": "contains"}}, "names no word"),
        ({"prompt": "x", "check": {"kind": "exact", "all": ["1"]}}, "a field 'all'"),
        ({"prompt": "x", "check": {"kind": "exact"}}, "kind exact and no reference"),
        ({"id": "1", "prompt": "x", "reference": "1"}, "another line has the id '1'"),
    ],
)
def test_an_invalid_line_raises_with_its_number(tmp_path, line, said):
    path = write(tmp_path / "mine.jsonl", {"prompt": "good", "reference": "1"}, line)
    with pytest.raises(BadRequest) as error:
        read_items(path)
    assert (
        said in str(error.value)
        and "ine 2 of mine.jsonl" in str(error.value)
        and "\n" not in str(error.value)
    )


def test_a_missing_an_empty_and_a_latin_1_file_raise(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    for path, said in (
        (tmp_path / "no.jsonl", "no file"),
        (tmp_path / "latin.jsonl", "not UTF-8"),
        (write(tmp_path / "empty.jsonl", ""), "is empty"),
    ):
        with pytest.raises(BadRequest, match=said):
            read_items(path)
