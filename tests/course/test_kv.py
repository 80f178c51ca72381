"""Errors of cached keys by who shares a scale, and steps over several formats: the functions behind notebook 05."""

import pytest
import torch

from labkit.errors import BadRequest
from labkit.lab.measure.clock import Timing
from labkit.model.tiny import tiny_model
from labkit.plan.kv import KVShape
from labkit.plan.kv_formats import Part, get_kv_format
from labkit_course.experiments import kv_errors, kv_steps

TOKEN, CHANNEL = Part(4, "token", None, 16, 16), Part(4, "channel", 32, 16, 16)


def striped(tokens=64):
    numbers = torch.rand(2, tokens, 16, generator=torch.Generator().manual_seed(0))
    numbers[:, :, 3] = 40 + numbers[:, :, 3]
    return numbers


def test_a_loud_channel_costs_less_when_channels_share():
    by_token, by_channel = (
        kv_errors.relative_errors([striped()], part)[1] for part in (TOKEN, CHANNEL)
    )
    assert by_channel < by_token / 4


@pytest.mark.parametrize("part", [TOKEN, CHANNEL])
def test_evenly_spread_numbers_lose_what_is_predicted(part):
    even = torch.rand(2, 512, 64, generator=torch.Generator().manual_seed(1))
    expected, found = kv_errors.relative_errors([even], part)
    assert found == pytest.approx(expected, rel=0.06)


def test_the_loudest_head_is_the_one_with_the_stripe():
    quiet = torch.rand(2, 64, 16, generator=torch.Generator().manual_seed(2))
    loud = quiet.clone()
    loud[1] = striped()[1]
    assert kv_errors.loudest([quiet, loud, quiet]) == (1, 1)
    assert kv_errors.spread([striped()]) > 20 > kv_errors.spread([quiet])


def test_keys_and_values_are_those_of_the_cache():
    model = tiny_model("llama")
    keys, values = kv_errors.keys_and_values(model, range(1, 9))
    assert len(keys) == model.config.num_layers
    assert keys[0].shape == (model.config.num_kv_heads, 8, model.config.head_dim) == values[0].shape
    assert keys[0].abs().min(-1).values.max() > 0


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_a_made_up_cache_holds_as_many_tokens_as_were_asked_for(name):
    shape = tiny_model("llama").config.kv_shape
    cache = kv_steps.made_up(name, shape, 100, dtype=torch.bfloat16)
    assert cache.lengths == (100,) and cache.capacity > 100
    if name != "bf16":
        assert cache.bulks[0].tokens == get_kv_format(name).packed_tokens(100)


def test_steps_and_layers_are_timed_and_leave_the_length_as_it_was():
    model = tiny_model("llama")
    layers = kv_steps.layer_times(
        model.config.kv_shape, model.config.num_heads, ["fp32", "int8"], 40, repeats=2
    )
    steps = kv_steps.step_times(model, ["fp32", "int8"], 40, repeats=2)
    assert set(layers) == set(steps) == {"fp32", "int8"}
    assert all(
        len(timing.times_s) == 2 and timing.median_s > 0
        for timing in (*layers.values(), *steps.values())
    )


def test_the_prediction_adds_layers_to_the_rest():
    one, step = Timing((0.001, 0.001)), Timing((0.05, 0.05))
    rest = kv_steps.rest_of_step(step, 30, one)
    assert rest == pytest.approx(0.02) and kv_steps.predicted(
        rest, 30, Timing((0.002, 0.002))
    ) == pytest.approx(0.08)


def test_a_format_that_cannot_be_stored_is_refused():
    with pytest.raises(BadRequest, match="bits8"):
        kv_steps.made_up("bits8", tiny_model("llama").config.kv_shape, 10)


def test_errors_need_a_block_of_a_quantised_part_and_zeros_have_none():
    for layers, part in (
        ([torch.randn(2, 8, 8)], CHANNEL),
        ([], CHANNEL),
        ([torch.randn(2, 64, 8)], Part(16)),
    ):
        with pytest.raises(BadRequest):
            kv_errors.relative_errors(layers, part)
    assert kv_errors.relative_errors([torch.zeros(2, 64, 8)], CHANNEL) == (0, 0)


@pytest.mark.parametrize(
    "given", [(4, [], 9), (3, ["int8"], 9), (4, ["int8"], 0), (4, ["int8"], "x"), (0, ["int8"], 9)]
)
def test_steps_that_cannot_be_timed_are_refused(given):
    with pytest.raises(BadRequest):
        kv_steps.layer_times(KVShape.uniform(1, 2, 8), *given)
