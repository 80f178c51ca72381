"""The task `text` compared with plain sums, for equal and for different models."""

import math

import pytest
import torch

from fakes import byte_tokenizer
from labkit.errors import BadRequest
from labkit.lab.evals.passages import Passage, Remembered, cut
from labkit.lab.evals.report import results
from labkit.lab.evals.task import run
from labkit.lab.evals.text import Text, score
from labkit.model.tiny import tiny_model
from labkit.quant import quantize_model


def passages(lengths=(40, 17, 200), slice="code"):
    generator = torch.Generator().manual_seed(0)
    return [
        Passage(
            f"p{n}", slice, tuple(torch.randint(0, 96, (n,), generator=generator).tolist()), n - 1
        )
        for n in lengths
    ]


class Given(Text):
    """`text` over passages that are there already."""

    def items(self):
        return passages()


def rows_of(model, task):
    rows = results(task.metrics, "text", run(task, model))
    return {(row["slice"], row["metric"]): row["value"] for row in rows}


def test_the_sums_follow_the_definition():
    model, other = tiny_model(seed=0), tiny_model(seed=1)
    for passage in passages():
        got = score(model, passage, Remembered(other, [passage]))
        tokens = torch.tensor([passage.tokens])
        q, p = (
            model(tokens)[0, :-1].double().log_softmax(-1),
            other(tokens)[0, :-1].double().log_softmax(-1),
        )
        targets = tokens[0, 1:]
        nll = -float(q[range(len(targets)), targets].sum())
        assert got.n == len(targets) == passage.nbytes
        assert got.metrics["nats_per_token"] == (pytest.approx(nll, rel=1e-5), got.n)
        assert got.metrics["bits_per_byte"] == (pytest.approx(nll / math.log(2), rel=1e-5), got.n)
        kl = float((p.exp() * (p - q)).sum())  # of the reference to the model
        assert got.metrics["kl"] == (pytest.approx(kl, rel=1e-5), got.n)
        assert got.metrics["top1"] == (int((p.argmax(-1) == q.argmax(-1)).sum()), got.n)


def test_the_kl_is_zero_for_the_same_model_and_positive_for_others():
    model = tiny_model()
    task = Given(None).against(model)
    value = rows_of(model, task)
    assert value["all", "kl"] == 0 and value["all", "top1"] == 1
    quantize_model(model, "int8_channel", kernel="plain")  # in place: the reference remembers
    eight = rows_of(model, task)
    model = tiny_model()
    quantize_model(model, "int2_g32_zp", kernel="plain")
    two = rows_of(model, task)
    assert 0 < eight["all", "kl"] < 0.02 < two["all", "kl"]
    assert two["all", "top1"] < eight["all", "top1"]


def test_cut_keeps_the_limit_and_counts_bytes():
    documents = [("a", "x" * 25), ("b", "y" * 100), ("c", "z")]
    made = cut(documents, "code", byte_tokenizer(), limit=60, length=20)
    assert [(p.id, len(p.tokens)) for p in made] == [
        ("a:0", 20),
        ("a:20", 5),
        ("b:0", 20),
        ("b:20", 15),
    ]
    assert [p.nbytes for p in made] == [19, 4, 19, 14]
    assert (
        len(cut(documents, "code", byte_tokenizer(), None, 512)) == 2
    )  # one token has nothing to predict


def test_other_vocabularies_unread_passages_and_nan_raise():
    model, one = tiny_model(), passages()[0]
    with pytest.raises(BadRequest, match="one vocabulary"):
        score(model, one, Remembered(tiny_model(vocab_size=97), [one]))
    with pytest.raises(BadRequest, match="not run on passage p17"):
        score(model, passages()[1], Remembered(model, passages()[:1]))
    model.norm.weight[0] = float("nan")
    with pytest.raises(BadRequest, match="not finite"):
        score(model, one)
