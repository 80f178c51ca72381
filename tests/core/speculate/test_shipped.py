"""The draft that comes with labkit: what its record says, and that it drafts for the default model."""

import pytest

from labkit.errors import BadRequest
from labkit.files import data_path
from labkit.generate import generate
from labkit.generate import generate as plain
from labkit.lab.bench.speculate import total
from labkit.lab.texts.prompt_kinds import prompts
from labkit.model.tiny import tiny_model
from labkit.speculate import LookupFirst, make_drafter, shipped
from labkit.speculate.trained import about_shipped, read_about

KINDS = ("humaneval", "chat", "edit")


def test_the_file_is_small_and_its_record_lies_beside_it():
    file = data_path("draft.safetensors")
    about = about_shipped()
    assert file.stat().st_size == about["file_bytes"] <= 15_000_000
    assert read_about(file)["recipe"] == about["recipe"]
    steps = [entry["step"] for entry in about["history"]]
    assert steps == sorted(steps) and steps[-1] == about["recipe"]["training"]["steps"]
    rows = {(row["drafter"], row["kind"]): row for row in about["acceptance"]}
    assert set(rows) >= {(drafter, kind) for drafter in ("draft", "lookup_draft") for kind in KINDS}


def test_it_is_for_the_default_model_and_no_other():
    with pytest.raises(BadRequest, match="another shape"):
        make_drafter("draft", tiny_model())


@pytest.mark.slow
@pytest.mark.real_model
def test_it_drafts_what_its_table_says():
    from labkit import load_model

    target = load_model()
    rows = {(row["drafter"], row["kind"]): row for row in about_shipped()["acceptance"]}
    draft = shipped(target)
    for name, drafter in (("draft", draft), ("lookup_draft", LookupFirst(draft))):
        for kind in KINDS:
            kept = []
            for prompt in prompts(kind)[:6]:
                ids = prompt.ids(target.tokenizer)
                done = generate(
                    target,
                    ids,
                    drafter=drafter,
                    draft_length=rows[name, kind]["draft_length"],
                    max_new_tokens=48,
                )
                assert done.tokens == plain(target, ids, max_new_tokens=48).tokens
                kept.append(done)
            row, whole = rows[name, kind], total(kept)
            assert whole.alpha > row["alpha"] - 0.12, (name, kind)
            assert whole.accepted_length > 0.8 * row["tokens_a_pass"], (name, kind)
