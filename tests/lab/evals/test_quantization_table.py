"""The table of quantization methods on a tiny model: one record per trial, also after a second run."""

from dataclasses import replace

import pytest

from fakes import WordTokenizer, load_script
from labkit.lab.evals.passages import Passage
from labkit.lab.measure.record import read_records
from labkit.lab.texts import Document
from labkit.model.tiny import tiny_model
from labkit.quant import Calibration, collect
from labkit_course.experiments import mixed_precision as mixed
from labkit_course.experiments.compare_methods import PartLoss
from labkit_course.experiments.mixed_precision import by_output_error
from labkit_course.experiments.quantization_records import recorded, rows

tables = load_script("data/make_quantization_trials.py")


def passages(slices=("code", "prose")):
    return [
        Passage(f"{s}{i}", s, tuple(range(3 + i, 30 + i)), 60) for s in slices for i in range(2)
    ]


@pytest.fixture
def tiny(monkeypatch):
    model = tiny_model(hidden_size=64, intermediate_size=64)
    monkeypatch.setattr(tables, "load_model", lambda name: model)
    monkeypatch.setattr(
        tables,
        "Text",
        lambda tokenizer, limit, *size, **options: type(
            "T", (), {"items": lambda self: passages()}
        )(),
    )
    monkeypatch.setattr(
        tables, "calibration", lambda m, seed: Calibration([[1, 2, 3, seed + 4, 9]])
    )
    monkeypatch.setattr(
        tables, "calibration_passages", lambda tokenizer, kind, seed: passages((kind,))
    )
    monkeypatch.setattr(tables, "ROUNDED", ("int4_g64_zp", "int8_channel"))
    monkeypatch.setattr(tables, "LAYER_BY_LAYER", (("int4_g64_zp", "gptq"),))
    return model


def test_every_trial_is_recorded_once_with_its_bits_and_its_seed(tiny, tmp_path):
    path = tmp_path / "trials.jsonl"
    methods = (("int4_g64_zp", "gptq"), ("int4_g64_zp", "awq+clip"))
    tables.run(path, (0, 1), 64, methods=methods)
    records = list(read_records(path))
    tables.run(path, (0, 1), 64, methods=methods)
    assert len(records) == len(list(read_records(path))) == 2 + 2 * (2 + 1) + len(tables.AT_FIVE)
    assert {r.seed for r in records} == {None, 0, 1} and all(
        r.value >= 0 and r.n == 4 * 26 for r in records
    )
    assert [r.seed for r in records if r.details["method"] == "gptq, layer by layer"] == [0, 1]
    mixed = [r for r in records if r.details["format"] == "mixed"]
    assert [r.details["method"] for r in mixed] == ["rtn", "awq+gptq+clip"]
    for record in mixed:
        assert record.details["bits"] <= tables.BUDGET and set(record.details["slices"]) == {
            "code",
            "prose",
        }
        assert len(record.details["formats"]) == 4 * tiny.config.num_layers


def test_rows_sum_up_over_seeds_and_compare_with_rounding(tiny, tmp_path):
    path = tmp_path / "trials.jsonl"
    tables.run(path, (0, 1), 64, methods=(("int4_g64_zp", "gptq"),))
    records = list(read_records(path))
    found = {(row.format, row.method): row for row in rows(records)}
    rounded, gptq = found["int4_g64_zp", "rtn"], found["int4_g64_zp", "gptq"]
    assert (rounded.seeds, gptq.seeds, rounded.of_rounding) == (1, 2, {})
    mine = [r.details["slices"]["code"]["kl"][0] for r in records if r.details["method"] == "gptq"]
    assert gptq.kl["code"] == (sum(mine) / 2, min(mine), max(mine))
    assert gptq.of_rounding["code"][1] == pytest.approx(min(mine) / rounded.kl["code"][0])
    tables.run(
        path, (0,), 99, methods=(("int4_g64_zp", "gptq"),)
    )  # "longer" text: trials of their own
    assert len(list(read_records(path))) == 2 * len(records) - 2  # one seed less
    longer = [
        replace(r, n=2 * r.n, value=0.0)
        for r in records
        if r.seed == 0 and r.details["method"] == "gptq"
    ]
    (one,) = [row for row in rows([*records, *longer]) if row.method == "gptq"]
    assert (one.seeds, one.n, one.of_rounding) == (1, 2 * records[0].n, {})
    assert [row.bits for row in rows(records)] == sorted(
        (row.bits for row in rows(records)), reverse=True
    )


def test_without_a_file_there_are_no_rows(monkeypatch, tmp_path):

    assert rows(recorded()), "the project's own records"
    monkeypatch.setattr("labkit.files.data_path", lambda name: tmp_path / name)
    assert rows(recorded()) == []


def test_the_text_that_chooses_formats_has_one_document_per_passage(monkeypatch):
    text = lambda words: "word " * words  # noqa: E731
    documents = [
        Document(f"d{i}", text(3 if i == 2 else 400)) for i in range(9)
    ]  # one is too short
    monkeypatch.setattr(mixed, "documents", lambda kind, part, seed: iter(documents))
    found = mixed.calibration_passages(WordTokenizer(), "code", seed=0, count=5, tokens=24)
    assert [one.id.split(":")[0] for one in found] == ["d0", "d1", "d3", "d4", "d5"]
    assert {(one.slice, len(one.tokens)) for one in found} == {("code", 24)}
    assert (
        len(mixed.calibration_passages(WordTokenizer(), "code", seed=0, count=50, tokens=24)) == 8
    )  # all there is


def test_output_errors_estimate_the_measured_losses_of_formats():
    """One measured format and H give the losses of the others within a factor of two, on a tiny random model."""
    model = tiny_model(hidden_size=64, intermediate_size=128)
    text = Calibration([[(7 * i + j) % 60 + 1 for j in range(40)] for i in range(8)])
    parts = {"down": ("layers.0.mlp.down",), "gate_up": ("layers.1.mlp.gate_up",)}
    names = [name for held in parts.values() for name in held]
    statistics = collect(model, names, text, lambda m, tokens, counts: m.hidden_states(tokens))
    loss = PartLoss(model, [Passage("a", "code", tuple(text.sequences[0]), 60)], parts)
    estimate = by_output_error(loss, statistics)
    for part in parts:
        assert estimate({part: "int4_g64_zp"}) == pytest.approx(loss({part: "int4_g64_zp"}))
        for format in ("int4_g32_zp", "int5_g64_zp", "int6_g64_zp"):
            assert 0.5 < estimate({part: format}) / loss({part: format}) < 2
        assert (
            estimate({part: "int6_g64_zp"})
            < estimate({part: "int5_g64_zp"})
            < estimate({part: "int4_g64_zp"})
        )
