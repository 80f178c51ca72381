"""The task `text` as items: windows that score each token once, a stored reference that bounds a KL from below."""

from __future__ import annotations

import math

import pytest
import torch

from labkit.errors import BadRequest
from labkit.evals.reading import Passage, Remembered, cut
from labkit.evals.report import results
from labkit.evals.task import run
from labkit.evals.text import evaluate, score
from labkit.evals.text import results as text_results
from labkit.evals.text_task import SLICES, Text
from labkit.evals.top_k import TopK


class Given(Text):
    """`text` over passages that are there already."""

    def items(self):
        return PASSAGES


PASSAGES = [
    Passage(f"p{n}", slice, tuple(torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist()), n - 1)
    for n, slice in ((40, "code"), (33, "prose"), (60, "prose"))
]


@pytest.mark.parametrize(("length", "overlap"), [(10, 1), (10, 4), (16, 9), (7, 6), (1000, 64)])
def test_a_sliding_window_scores_every_token_but_the_first_once(byte_model, length, overlap):
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
    with pytest.raises(BadRequest, match="cannot overlap by 10"):
        cut([("doc", text)], "code", byte_model.tokenizer, None, 10, 10)


def test_context_tokens_are_read_and_not_scored(byte_model):
    whole = PASSAGES[0]
    late = Passage("late", "code", whole.tokens, 20, first=20)
    other = tiny(1)
    tokens = torch.tensor([whole.tokens])
    q, p = (m(tokens)[0, 19:-1].double().log_softmax(-1) for m in (byte_model, other))
    found = score(byte_model, late, Remembered(other, [late]))
    assert found.n == 20
    assert found.nll == pytest.approx(-float(q[range(20), tokens[0, 20:]].sum()), rel=1e-5)
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-5)


def tiny(seed):
    from labkit.model.tiny import tiny_model

    return tiny_model(seed=seed, vocab_size=256)


def test_items_give_the_rows_of_the_plain_sums(byte_model):
    reference = Remembered(tiny(1), PASSAGES)
    task = Given(None, reference=reference)
    rows = {(row["slice"], row["metric"]): row for row in results(task.metrics, "text", run(task, byte_model))}
    for old in text_results(evaluate(byte_model, PASSAGES, reference)):
        row = rows[old["slice"], old["metric"]]
        assert (row["value"], row["n"]) == (pytest.approx(old["value"]), old["n"])
    nats = rows["all", "nats_per_token"]["value"]
    assert nats == pytest.approx(rows["all", "bits_per_byte"]["value"] * math.log(2))  # here a token is a byte
    assert {m.name for m in Given(None).metrics} == {"bits_per_byte", "nats_per_token"}


@pytest.mark.parametrize("k", [1, 8, 255])
def test_a_stored_reference_bounds_the_kl_from_below(byte_model, tmp_path, k):
    other = tiny(1)
    TopK.remember(other, PASSAGES, k).save(tmp_path / "top.safetensors")
    stored = TopK.load(tmp_path / "top.safetensors")
    assert stored.about["k"] == str(k)
    for passage in PASSAGES:
        full, bound = score(byte_model, passage, Remembered(other, [passage])), score(byte_model, passage, stored)
        assert bound.top1 == full.top1 and bound.nll == full.nll
        assert 0 <= bound.kl <= full.kl + 1e-4
        if k == 255:
            assert bound.kl == pytest.approx(full.kl, rel=1e-3)
    assert {m.name for m in Given(None, reference=stored).metrics} >= {"kl_lower_bound", "top1"}
    same = score(other, PASSAGES[0], stored)
    assert same.kl == pytest.approx(0, abs=1e-4) and same.top1 == same.n


def test_a_stored_reference_of_other_passages_or_another_file_is_refused(byte_model, tmp_path):
    stored = TopK.remember(byte_model, PASSAGES[:1], 4)
    with pytest.raises(BadRequest, match="holds no passage p33"):
        score(byte_model, PASSAGES[1], stored)
    with pytest.raises(BadRequest, match="another tokenizer"):
        score(byte_model, Passage("p40", "code", PASSAGES[0].tokens[:20], 19), stored)
    (tmp_path / "x.safetensors").write_bytes(b"no")
    with pytest.raises(BadRequest, match="not a stored reference"):
        TopK.load(tmp_path / "x.safetensors")


@pytest.mark.real_model
def test_every_slice_has_text(byte_model):
    items = Text(byte_model.tokenizer, 300).items()
    assert {item.slice for item in items} == set(SLICES)
    for name in SLICES:
        tokens = sum(len(item.tokens) - item.first * (item.first > 1) for item in items if item.slice == name)
        assert 250 <= tokens <= 301
    with pytest.raises(BadRequest, match="no slice 'verse'"):
        Text(byte_model.tokenizer, slices=("verse",)).items()
