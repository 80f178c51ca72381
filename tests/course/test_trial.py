"""Trials: one model, one text, many ways to quantise it; the model itself never changes."""

import pytest
import torch

from labkit.errors import BadRequest
from labkit.formats import dequantize, round_to_nearest
from labkit.lab.evals.passages import Passage, Remembered
from labkit.lab.evals.text import score
from labkit.model.tiny import tiny_model
from labkit.quant import Calibration, collect, quantize_model, search
from labkit_course.experiments.compare_methods import PartLoss, Trials, paired, parts_by_depth

PASSAGES = [
    Passage(
        f"{i}", "code" if i % 2 else "prose", tuple((7 * i + 3 * j) % 60 for j in range(12)), 40
    )
    for i in range(6)
]


def kl_of(changed, passage, model):
    return score(changed, passage, Remembered(model, [passage])).metrics["kl"][0]


@pytest.fixture
def model():
    return tiny_model(seed=3)


def test_a_trial_is_the_kl_of_the_model_quantised_by_hand(model):
    trial = Trials(model, PASSAGES).run("int4_g32_zp")
    other = tiny_model(seed=3)
    report = quantize_model(other, Trials(model, PASSAGES).recipe("int4_g32_zp"), kernel="plain")
    want = sum(kl_of(other, p, model) for p in PASSAGES) / sum(len(p.tokens) - 1 for p in PASSAGES)
    assert trial.kl()[0] == pytest.approx(want, rel=1e-3) and want > 0
    assert trial.bits == pytest.approx(report.block_bits())
    assert trial.tokens("code") + trial.tokens("prose") == trial.tokens()


def test_only_the_layers_that_are_tried_change_and_the_model_does_not(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    some = Trials(model, PASSAGES, layers=[0]).run("int3_g32_zp")
    every = Trials(model, PASSAGES).run("int3_g32_zp")
    assert 0 < some.kl()[0] < every.kl()[0]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_statistics_serve_several_methods_as_a_calibration_would(model):
    calibration = Calibration([[(5 * i + j) % 60 for j in range(16)] for i in range(8)])
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "head"]
    statistics = collect(model, names, calibration)
    bench = Trials(model, PASSAGES, statistics)
    first = bench.run("int4_g32_zp", "gptq")
    bench.run("int4_g32_zp", "awq")
    assert bench.run("int4_g32_zp", "gptq").kl() == first.kl(), (
        "a method spoiled the statistics of the next"
    )
    other = tiny_model(seed=3)
    quantize_model(other, bench.recipe("int4_g32_zp"), "gptq", calibration, kernel="plain")
    assert first.kl()[0] == pytest.approx(
        sum(kl_of(other, p, model) for p in PASSAGES) / first.tokens(), rel=1e-3
    )


def test_paired_ratios(model):
    bench = Trials(model, PASSAGES)
    low, high = bench.run("int3_g32_zp"), bench.run("int6_g32_zp")
    value, least, most = paired(high, low)
    assert least <= value <= most < 1 and value == pytest.approx(high.kl()[0] / low.kl()[0])
    assert paired(low, low) == (1.0, 1.0, 1.0)


def test_part_losses_leave_the_model_and_feed_the_search(model):
    parts = parts_by_depth(model, 1)
    loss = PartLoss(model, PASSAGES[:2], parts)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert loss({}) == pytest.approx(0, abs=1e-6)
    part = next(iter(parts))
    assert loss({part: "int2_g32_zp"}) > loss({part: "int6_g32_zp"}) > 0
    recipe, sensitivity = search(
        loss.shapes(), loss, 5.0, ("int3_g32_zp", "int4_g32_zp", "int6_g32_zp")
    )
    assert set(sensitivity) == set(parts) and set(recipe.overrides) == set(parts)
    names = loss.expand(recipe.overrides)
    assert len(names) == sum(len(one) for one in parts.values()) and all(
        name.startswith("layers.") for name in names
    )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_part_loss_starts_at_its_layer_and_is_the_whole_models_kl(model):
    parts = parts_by_depth(model, len(model.layers))
    loss = PartLoss(model, PASSAGES[:3], parts)
    for part in (next(iter(parts)), list(parts)[-1]):  # in the first layer and in the last
        other = tiny_model(seed=3)
        for name in parts[part]:
            weight = other.get_submodule(name).weight
            weight.data = dequantize(round_to_nearest(weight.data, "int3_g32_zp"))
        want = sum(kl_of(other, p, model) for p in PASSAGES[:3]) / sum(
            len(p.tokens) - 1 for p in PASSAGES[:3]
        )
        assert loss({part: "int3_g32_zp"}) == pytest.approx(want, rel=1e-3) and want > 0


def test_stretches_of_layers_that_do_not_exist_are_refused(model):
    with pytest.raises(BadRequest, match="ranges of"):
        parts_by_depth(model, 99)
