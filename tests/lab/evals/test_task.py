"""A run of a task writes the same records in any batch and after it is resumed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from labkit.errors import BadRequest
from labkit.lab.evals import TASKS, make_task
from labkit.lab.evals.task import ItemScore, Metric, read_scores, run, tasks_in
from labkit.lab.measure.record import read_records


@dataclass(frozen=True)
class Item:
    id: str


class Toy:
    name, metrics = "toy", (Metric("right", share=True),)

    def __init__(self, count=7, stop_at=None):
        self.count, self.stop_at, self.scored = count, stop_at, []

    def items(self):
        return [Item(f"i{n}") for n in range(self.count)]

    def score(self, model, items):
        for item in items:
            if item.id == self.stop_at:
                raise KeyboardInterrupt
            self.scored.append(item.id)
            if item.id == "i3":
                yield ItemScore(item.id, "odd", error="no answer")
            else:
                yield ItemScore(
                    item.id, "a", {"right": (float(item.id > "i2"), 1.0)}, details={"said": [1, 2]}
                )


def test_a_killed_run_resumes_with_the_next_item(tmp_path):
    path, whole = tmp_path / "run.jsonl", run(Toy(), None)
    with pytest.raises(KeyboardInterrupt):
        run(Toy(stop_at="i5"), None, path)
    assert len(read_records(path)) == 5
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"what": "eval.toy", "val')  # killed in the middle of a line
    again = Toy()
    assert run(again, None, path) == whole and again.scored == ["i5", "i6"]
    untouched = Toy()
    assert run(untouched, None, path) == whole and untouched.scored == []
    assert tasks_in(path) == ["toy"] and read_scores(path, "toy") == whole


def test_batches_change_no_score():
    whole = run(Toy(), None)
    for batch in (1, 3, 100):
        assert run(Toy(), None, batch=batch) == whole
    with pytest.raises(BadRequest, match="0 items"):
        run(Toy(count=0), None)


def test_a_file_with_other_settings_raises(tmp_path):
    path = tmp_path / "run.jsonl"
    run(Toy(), None, path, settings={"recipe": None})
    with pytest.raises(BadRequest, match="recipe None, and this run has 'int4'"):
        run(Toy(), None, path, settings={"recipe": "int4"})


def test_a_record_has_its_slice_and_an_item_without_a_score_has_no_value(tmp_path):
    path = tmp_path / "run.jsonl"
    run(Toy(), None, path)
    records = {record.item: record for record in read_records(path)}
    assert (
        records["i4"].value == 1
        and records["i3"].value is None
        and records["i3"].notes == "no answer"
    )
    assert records["i4"].details["slice"] == "a" and records["i4"].machine


@pytest.mark.real_model
def test_every_registered_task_keeps_the_contract(byte_model):
    for name in TASKS:
        task = make_task(name, byte_model, 3)
        items = task.items()
        assert task.name == name and items and len({item.id for item in items}) == len(items)
        assert all(isinstance(metric, Metric) for metric in task.metrics)
    with pytest.raises(BadRequest, match="'humanevil' is unknown"):
        make_task("humanevil", byte_model)
