"""Text read through a quantized KV cache: the KL follows its definition, and most keys are quantized."""

import pytest
import torch

from labkit.cache import windowed_cache
from labkit.errors import BadRequest
from labkit.lab.evals.passages import Passage
from labkit.lab.evals.report import results
from labkit.lab.evals.task import run
from labkit.lab.evals.text import Text
from labkit.lab.evals.through_cache import ThroughCache
from labkit.model.tiny import tiny_model


def passages(length=160, count=2, first=100):
    generator = torch.Generator().manual_seed(0)
    return [
        Passage(
            f"p{i}",
            "code",
            tuple(torch.randint(0, 96, (length,), generator=generator).tolist()),
            7,
            first,
        )
        for i in range(count)
    ]


def evaluate(model, items, how):
    return list(Text(None, through=how).score(model, items))


def value(scores, metric):
    rows = results(Text(None, through=ThroughCache("int8")).metrics, "text", scores)
    return next(r["value"] for r in rows if r["metric"] == metric and r["slice"] == "all")


def test_the_sums_follow_the_definition():
    model, how = tiny_model(), ThroughCache("int8", first=100, length=160)
    (item,) = passages(count=1)
    (got,) = evaluate(model, [item], how)
    tokens = torch.tensor([item.tokens])
    p, cache, q = (
        model(tokens)[0].double().log_softmax(-1),
        how.maker(model)(model.config.kv_shape, batch=1, capacity=160),
        [],
    )
    for start in range(0, 160, 16):
        q.append(model(tokens[:, start : start + 16], cache)[0])
    q = torch.cat(q).double().log_softmax(-1)
    at = slice(99, 159)
    nll = -float(q[at].gather(1, tokens[0, 100:, None]).sum())
    kl = float((p.exp() * (p - q))[at].sum())
    assert got.n == 60 and got.metrics["bits_per_byte"][1] == 7
    assert got.metrics["kl"] == (pytest.approx(kl, rel=1e-3), 60)
    assert got.metrics["top1"] == (int((p.argmax(-1) == q.argmax(-1))[at].sum()), 60)
    assert got.metrics["nats_per_token"] == (pytest.approx(nll, rel=1e-5), 60)


def test_more_bits_give_a_smaller_kl_and_a_plain_cache_gives_none():
    model, kl = tiny_model(head_dim=16), {}
    for name in ("fp32", "int8", "int4", "int2"):
        kl[name] = value(
            evaluate(model, passages(700, 1, 640), ThroughCache(name, first=640, length=700)), "kl"
        )
    assert kl["fp32"] < 1e-6 < kl["int8"] < kl["int4"] < kl["int2"]


def test_too_few_quantized_keys_raise():
    model = tiny_model()
    assert (
        ThroughCache("int8").share_quantized() == 1
        and 0.9 < ThroughCache("int4").share_quantized() < 0.95
    )
    with pytest.raises(BadRequest, match=r"Only \d+% .* tail of 64"):
        evaluate(model, passages(200), ThroughCache("int4", first=100, length=200))
    assert (
        value(
            evaluate(model, passages(64, first=32), ThroughCache("fp32", first=32, length=64)), "kl"
        )
        < 1e-6
    )


def test_another_cache_can_be_read_the_same_way():
    model = tiny_model()
    kl = [
        value(
            evaluate(
                model,
                passages(),
                ThroughCache("fp32", first=100, length=160, cache=windowed_cache(w)),
            ),
            "kl",
        )
        for w in (8, 160)
    ]
    assert kl[1] < 1e-6 < 1e-3 < kl[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ThroughCache("int8", chunk=17),
        lambda: ThroughCache("int8", first=1024),
        lambda: ThroughCache("int8", length=4096),
        lambda: ThroughCache("int9"),
        lambda: ThroughCache.up_to("int8", 300),
        lambda: ThroughCache("int8", first=0),
        lambda: ThroughCache("int8", first=-5),
        lambda: ThroughCache("int8", chunk=True),
        lambda: ThroughCache("int8", length="640"),
        lambda: Text(None, slices=("poems",), through=ThroughCache("int8")),
        lambda: Text(None, slices=(), through=ThroughCache("int8")),
        lambda: ThroughCache("bits4").maker(tiny_model()),
    ],
)
def test_invalid_readers_raise(make):
    with pytest.raises(BadRequest):
        make()


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize(("name", "bar"), [("int8", 0.0012), ("int4", 0.010)])
def test_the_kl_on_the_default_model_stays_below_the_limit(name, bar):
    from labkit.lab.stack.open import load_model

    model = load_model()
    task = Text(model.tokenizer, 1024, ("code", "prose"), through=ThroughCache(name))
    for row in results(task.metrics, "text", run(task, model)):
        assert row["metric"] != "kl" or row["value"] <= bar, row
