"""The task `text`: each token is scored once, and notebook and command give the same intervals."""

from __future__ import annotations

import json
import math

import pytest
import torch

from labkit.errors import BadRequest
from labkit.lab.evals.passages import SLICES, Passage, Remembered, cut
from labkit.lab.evals.report import results
from labkit.lab.evals.task import run
from labkit.lab.evals.text import Text, score
from labkit.quant.recipe import Recipe


class Given(Text):
    """`text` over passages that are there already."""

    def items(self):
        return PASSAGES


PASSAGES = [
    Passage(
        f"p{n}",
        slice,
        tuple(torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist()),
        n - 1,
    )
    for n, slice in ((40, "code"), (33, "prose"), (60, "prose"))
]


@pytest.mark.parametrize(("length", "overlap"), [(10, 1), (10, 4), (16, 9), (7, 6), (1000, 64)])
def test_a_sliding_window_scores_every_token_except_the_first_once(byte_model, length, overlap):
    text = "".join(chr(97 + i % 26) for i in range(103))
    pieces = cut([("doc", text)], "code", byte_model.tokenizer, None, length, overlap)
    ids, scored = byte_model.tokenizer.encode(text), []
    for piece in pieces:
        start = int(piece.id.rpartition(":")[2])
        assert list(piece.tokens) == ids[start : start + len(piece.tokens)]
        assert piece.first == 1 or piece.first >= overlap  # context of a later window
        scored += range(start + piece.first, start + len(piece.tokens))
        assert piece.nbytes == len(piece.tokens) - piece.first
    assert scored == list(range(1, 103))
    limited = cut([("doc", text)], "code", byte_model.tokenizer, 50, length, overlap)
    assert sum(len(p.tokens) - p.first for p in limited) in (49, 50)
    with pytest.raises(BadRequest, match="overlap by 10"):
        cut([("doc", text)], "code", byte_model.tokenizer, None, 10, 10)


@pytest.mark.parametrize("text", ["ภาษาไทย" * 9, "हिन्दी " * 9, "🙂🙃" * 20, "plain and größer" * 4])
@pytest.mark.parametrize(("length", "overlap"), [(64, 0), (10, 0), (16, 9), (7, 1)])
def test_the_bytes_of_a_passage_are_those_of_its_tokens(byte_model, text, length, overlap):
    pieces = cut([("doc", text)], "th", byte_model.tokenizer, None, length, overlap)
    assert [p.nbytes for p in pieces] == [len(p.tokens) - p.first for p in pieces]
    if overlap:
        assert sum(p.nbytes for p in pieces) == len(text.encode()) - 1


def test_context_tokens_are_read_and_not_scored(byte_model):
    whole = PASSAGES[0]
    late = Passage("late", "code", whole.tokens, 20, first=20)
    other = tiny(1)
    tokens = torch.tensor([whole.tokens])
    q, p = (m(tokens)[0, 19:-1].double().log_softmax(-1) for m in (byte_model, other))
    found = score(byte_model, late, Remembered(other, [late]))
    assert found.n == 20
    nll, kl = -float(q[range(20), tokens[0, 20:]].sum()), float((p.exp() * (p - q)).sum())
    assert found.metrics["nats_per_token"] == (pytest.approx(nll, rel=1e-5), 20)
    assert found.metrics["kl"] == (pytest.approx(kl, rel=1e-5), 20)


def tiny(seed):
    from labkit.model.tiny import tiny_model

    return tiny_model(seed=seed, vocab_size=256)


def test_rows_are_sums_over_items_and_need_a_reference_for_kl(byte_model):
    task = Given(None, reference=Remembered(tiny(1), PASSAGES))
    scores = run(task, byte_model)
    rows = {(row["slice"], row["metric"]): row for row in results(task.metrics, "text", scores)}
    for slice in ("code", "prose", "all"):
        chosen = [s for s in scores if slice in ("all", s.slice)]
        for metric in ("kl", "top1", "bits_per_byte"):
            above, below = (sum(s.metrics[metric][i] for s in chosen) for i in (0, 1))
            row = rows[slice, metric]
            assert row["value"] == pytest.approx(above / below)
            assert (row["n"], row["items"]) == (sum(s.n for s in chosen), len(chosen))
    nats = rows["all", "nats_per_token"]["value"]
    assert nats == pytest.approx(
        rows["all", "bits_per_byte"]["value"] * math.log(2)
    )  # here a token is a byte
    assert {m.name for m in Given(None).metrics} == {"bits_per_byte", "nats_per_token"}


@pytest.mark.real_model
def test_notebook_and_command_give_the_same_value_and_the_same_interval(
    make_byte_model, monkeypatch, capsys
):
    import labkit.lab.stack.open
    from labkit.lab.cli import main
    from labkit.quant import quantize_model

    load = lambda name="default", **_: make_byte_model(name=name)  # noqa: E731
    monkeypatch.setattr(labkit.lab.stack.open, "load_model", load)
    options = ["--slices", "code,prose", "--recipe", "int4_g32_zp", "--limit", "4000"]
    assert main(["eval", "text", *options, "--json"]) == 0
    by_command = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    model, changed = load(), load()
    quantize_model(changed, Recipe.named("int4_g32_zp"), kernel="plain")
    task = Text(model.tokenizer, 4000, ("code", "prose")).against(model)
    rows = results(task.metrics, task.name, run(task, changed))
    assert [(r["slice"], r["metric"], r["n"]) for r in rows] == [
        (r["slice"], r["metric"], r["n"]) for r in by_command
    ]
    for mine, theirs in zip(rows, by_command):
        assert theirs["low"] is not None
        for key in ("value", "low", "high"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6)


@pytest.mark.real_model
def test_every_slice_has_text(byte_model):
    items = Text(byte_model.tokenizer, 300).items()
    assert {item.slice for item in items} == set(SLICES)
    for name in SLICES:
        tokens = sum(
            len(item.tokens) - item.first * (item.first > 1) for item in items if item.slice == name
        )
        assert 250 <= tokens <= 301
    with pytest.raises(BadRequest, match="'verse' is not a slice of text"):
        Text(byte_model.tokenizer, slices=("verse",)).items()
