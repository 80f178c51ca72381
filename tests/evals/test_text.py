"""The task `text` against plain sums, with models that are known to be right, wrong and equal."""

import math

import pytest
import torch

from labkit.errors import BadRequest
from labkit.evals.reading import Passage, Remembered, cut
from labkit.evals.text import evaluate, ratio_interval, results, score
from labkit.model.tiny import tiny_model
from labkit.quant import quantize_model


class Letters:
    def encode(self, text):
        return [byte % 96 for byte in text.encode()]

    def decode(self, ids):
        return "".join(chr(32 + i) for i in ids)


def passages(lengths=(40, 17, 200), slice="code"):
    generator = torch.Generator().manual_seed(0)
    return [
        Passage(f"p{n}", slice, tuple(torch.randint(0, 96, (n,), generator=generator).tolist()), n - 1) for n in lengths
    ]


def test_the_sums_are_those_of_the_definition():
    model, other = tiny_model(seed=0), tiny_model(seed=1)
    for passage in passages():
        got = score(model, passage, other)
        tokens = torch.tensor([passage.tokens])
        q, p = model(tokens)[0, :-1].double().log_softmax(-1), other(tokens)[0, :-1].double().log_softmax(-1)
        targets = tokens[0, 1:]
        assert got.n == len(targets) == got.nbytes
        assert got.nll == pytest.approx(-float(q[range(len(targets)), targets].sum()), rel=1e-5)
        assert got.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-5)  # of the reference to the model
        assert got.top1 == int((p.argmax(-1) == q.argmax(-1)).sum())


def test_the_same_model_has_no_distance_and_another_has_some():
    model = tiny_model()
    same = results(evaluate(model, passages(), model))
    value = {(r["slice"], r["metric"]): r["value"] for r in same}
    assert value["all", "kl"] == 0 and value["all", "top1"] == 1
    reference = Remembered(model, passages())
    quantize_model(model, "int8_channel", kernel="plain")  # in place: the reference remembers
    eight = {r["metric"]: r["value"] for r in results(evaluate(model, passages(), reference)) if r["slice"] == "all"}
    model = tiny_model()
    quantize_model(model, "int2_g32_zp", kernel="plain")
    two = {r["metric"]: r["value"] for r in results(evaluate(model, passages(), reference)) if r["slice"] == "all"}
    assert 0 < eight["kl"] < 0.02 < two["kl"] and two["top1"] < eight["top1"]


def test_records_have_the_agreed_keys_and_slices():
    scores = evaluate(tiny_model(), passages() + passages((30, 31), "prose"))
    rows = results(scores)
    assert {tuple(row) for row in rows} == {("task", "slice", "metric", "value", "low", "high", "n")}
    assert [(r["slice"], r["metric"]) for r in rows] == [(s, "bits_per_byte") for s in ("code", "prose", "all")]
    everything = rows[-1]
    total = sum(s.nll for s in scores) / math.log(2) / sum(s.nbytes for s in scores)
    assert everything["value"] == pytest.approx(total) and everything["n"] == sum(s.n for s in scores)
    assert everything["low"] <= everything["value"] <= everything["high"]
    assert results(scores) == rows  # equal seeds, equal records


def test_cutting_keeps_the_limit_and_counts_bytes():
    documents = [("a", "x" * 25), ("b", "y" * 100), ("c", "z")]
    made = cut(documents, "code", Letters(), limit=60, length=20)
    assert [(p.id, len(p.tokens)) for p in made] == [("a:0", 20), ("a:20", 5), ("b:0", 20), ("b:20", 15)]
    assert [p.nbytes for p in made] == [19, 4, 19, 14]
    assert len(cut(documents, "code", Letters(), None, 512)) == 2  # one token has nothing to predict


def test_what_cannot_be_scored_is_refused():
    model = tiny_model()
    with pytest.raises(BadRequest, match="No passage"):
        evaluate(model, [])
    with pytest.raises(BadRequest, match="one vocabulary"):
        score(model, passages()[0], tiny_model(vocab_size=97))
    with pytest.raises(BadRequest, match="not run on passage p17"):
        score(model, passages()[1], Remembered(model, passages()[:1]))
    model.norm.weight[0] = float("nan")
    with pytest.raises(BadRequest, match="NaN"):
        score(model, passages()[0])


def test_intervals():
    assert ratio_interval([1.0], [2.0]) == (0.5, None, None)
    value, low, high = ratio_interval([1.0, 2.0, 3.0, 4.0], [1, 1, 1, 1])
    assert value == 2.5 and 1.0 <= low < 2.5 < high <= 4.0
    assert ratio_interval([2.0, 4.0], [1, 2]) == (2.0, 2.0, 2.0)
