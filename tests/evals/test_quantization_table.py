"""The table of methods on a tiny model: every trial is there once, and a second call adds nothing."""

import pytest

from labkit.evals import quantization_table as tables
from labkit.evals.reading import Passage
from labkit.measure.record import read_records
from labkit.model.tiny import tiny_model
from labkit.quant import Calibration


def passages(slices=("code", "prose")):
    return [Passage(f"{s}{i}", s, tuple(range(3 + i, 30 + i)), 60) for s in slices for i in range(2)]


@pytest.fixture
def tiny(monkeypatch):
    model = tiny_model(hidden_size=64, intermediate_size=64)
    monkeypatch.setattr(tables, "load_model", lambda name: model)
    monkeypatch.setattr(tables, "TextTask", lambda tokenizer, limit: type("T", (), {"items": lambda self: passages()})())
    monkeypatch.setattr(tables, "calibration", lambda m, seed: Calibration([[1, 2, 3, seed + 4, 9]], seed=seed))
    monkeypatch.setattr(tables, "cut", lambda documents, kind, *rest: passages((kind,)))
    monkeypatch.setattr(tables, "ROUNDED", ("int4_g64_zp", "int8_channel"))
    return model


def test_every_trial_is_recorded_once_with_its_bits_and_its_seed(tiny, tmp_path):
    path = tmp_path / "trials.jsonl"
    methods = (("int4_g64_zp", "gptq"), ("int4_g64_zp", "awq+clip"))
    tables.run(path, (0, 1), 64, methods=methods)
    records = list(read_records(path))
    tables.run(path, (0, 1), 64, methods=methods)
    assert len(records) == len(list(read_records(path))) == 3 + 2 * 2
    assert {r.seed for r in records} == {None, 0, 1} and all(r.value >= 0 and r.n == 4 * 26 for r in records)
    found = {r.details["format"]: r for r in records}
    assert found["mixed"].details["bits"] <= tables.BUDGET
    assert set(found["mixed"].details["slices"]) == {"code", "prose"}
