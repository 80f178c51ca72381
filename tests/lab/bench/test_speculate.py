"""Test `bench speculate` on a tiny model, and predictions of its speed-ups."""

import json

import pytest

import labkit.lab.stack.open
from labkit.errors import BadRequest
from labkit.lab.bench import speculate
from labkit.lab.bench.speculation_costs import MeasuredCosts
from labkit.lab.cli import main
from labkit.lab.texts.prompt_kinds import KINDS, prompts
from labkit.model.tiny import tiny_model
from labkit.model.tokenizer import Tokenizer
from labkit.plan.time import SpeculationCosts, speculative_speedup
from labkit.speculate import make_drafter
from labkit_course.experiments import predicted_speculation


@pytest.fixture
def tiny(monkeypatch):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )

    def load(name="default", **_):
        model = tiny_model(vocab_size=256, num_layers=4)
        model.tokenizer = Tokenizer(backend, chat_template="<{{ messages[0].content }}>")
        return model

    monkeypatch.setattr(labkit.lab.stack.open, "load_model", load)
    return load()


def test_the_result_has_the_documented_keys(tiny, capsys):
    arms = "lookup:chat,int8_channel:chat,draft:chat,auto:list"
    assert (
        main(
            [
                "bench",
                "speculate",
                "--arms",
                arms,
                "--recipe",
                "fp32",
                "--prompts",
                "2",
                "--new-tokens",
                "8",
                "--repeats",
                "1",
                "--json",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["arms"]) == {
        "plain:chat",
        "lookup:chat",
        "int8_channel:chat",
        "plain:list",
        "auto:list",
    }
    assert set(result["ratios"]) == {
        "lookup:chat/plain",
        "int8_channel:chat/plain",
        "auto:list/plain",
    }
    assert "draft" in result["missing"]
    arm = result["arms"]["lookup:chat"]
    assert (
        arm["same_tokens"] == 1.0
        and arm["accepted"] <= arm["examined"] <= arm["drafted"]
        and arm["tok_s"] > 0
    )
    assert {
        "alpha",
        "draft_yield",
        "accepted_length",
        "c",
        "draft_s",
        "verify_s",
        "overhead_s",
    } <= set(arm)


def test_an_unknown_drafter_is_an_error(tiny):
    with pytest.raises(BadRequest, match="oracle"):
        speculate.run(speculate.Settings(["oracle:chat"], "fp32"))


def test_drafts_of_one_length_are_predicted_by_the_textbook_formula():
    costs = SpeculationCosts(0.2, (1.0, 1.1, 1.2, 1.3))
    alike = predicted_speculation.predicted_speedup([(3, 1)] * 5, 0.7, costs.pass_cost(3))
    assert alike == pytest.approx(speculative_speedup(0.7, 3, costs))
    mixed = predicted_speculation.predicted_speedup([(3, 0), (0, 0)], 0.7, 1.45)
    assert mixed == pytest.approx((1 + 0.7 + 0.49 + 0.343 + 1) / 2 / 1.45)


def test_predictions_use_the_other_half_of_the_prompts(tiny):
    learnt, timed = predicted_speculation.halves("chat", tiny.tokenizer, 3)
    assert len(learnt) == len(timed) == 3 and not set(map(tuple, learnt)) & set(map(tuple, timed))
    costs = MeasuredCosts(1.0, (1.0, 1.1), {"lookup": 0.0}, {"lookup": 0.0})
    (trial,) = predicted_speculation.predict_and_measure(
        tiny, {"lookup": make_drafter("lookup", tiny)}, ["chat"], costs, count=1, new_tokens=8
    )
    assert trial.predicted > 0 and trial.measured.value > 0 and trial.same_tokens


def test_a_prediction_does_not_read_the_half_that_is_measured(tiny, monkeypatch):
    texts = predicted_speculation.halves("chat", tiny.tokenizer, 2)
    real, told = predicted_speculation.rounds, predicted_speculation._guess
    kept, used = {}, []

    def rounds(target, drafters, both, *rest):
        runs = real(target, drafters, both, *rest)
        kept.update(
            {id(done): tuple(ids) for one in runs["lookup"] for done, ids in zip(one, both)}
        )
        return runs

    def guess(completions, plain_s):
        used.extend(kept[id(done)] for done in completions)
        return told(completions, plain_s)

    monkeypatch.setattr(predicted_speculation, "rounds", rounds)
    monkeypatch.setattr(predicted_speculation, "_guess", guess)
    costs = MeasuredCosts(1.0, (1.0, 1.1), {"lookup": 0.0}, {"lookup": 0.0})
    predicted_speculation.predict_and_measure(
        tiny, {"lookup": make_drafter("lookup", tiny)}, ["chat"], costs, count=2, new_tokens=8
    )
    assert used == [tuple(ids) for ids in texts[0]]


@pytest.mark.real_model
def test_every_kind_has_prompts_and_they_stay_the_same():
    for kind in KINDS:
        made = prompts(kind)
        assert len(made) >= 8 and len(set(made)) == len(made) and made == prompts(kind)
        assert all(
            prompt.kind == kind and prompt.chat == (kind != "humaneval") and prompt.text.strip()
            for prompt in made
        )
    with pytest.raises(BadRequest, match="poetry"):
        prompts("poetry")
