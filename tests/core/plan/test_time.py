"""Compare operations and bytes with plain loops; test the roofline and the predicted times."""

import pytest

from labkit.errors import BadRequest
from labkit.lab.plan.memory import resolve
from labkit.lab.plan.operator_times import Curve, OperatorTimes, fused_products, predict
from labkit.plan.kv import LayerKV
from labkit.plan.shapes import model_shape
from labkit.plan.time import (
    compute_bound_batch,
    money_per_million_tokens,
    pairs,
    step_cost,
)


@pytest.mark.parametrize("window, sinks", [(None, 0), (4, 0), (4, 2), (1, 0)])
@pytest.mark.parametrize("tokens, past", [(1, 0), (1, 9), (3, 2), (7, 0), (5, 20)])
def test_pairs_equal_a_count_over_queries_and_keys(window, sinks, tokens, past):
    layer = LayerKV(1, 8, window=window, sinks=sinks)
    found = 0
    for query in range(past, past + tokens):
        visible = [
            key for key in range(query + 1) if window is None or key > query - window or key < sinks
        ]
        found += len(visible)
    assert pairs(layer, tokens, past) == found


def test_a_dense_decode_step_has_two_operations_per_weight_and_reads_each_weight_once():
    model = resolve("llama-3.1-8b")
    cost = step_cost(model, past=0)
    vectors = sum(m.parameters for m in model.part("vectors"))
    multiplied = (
        model.parameters - model.vocab_size * model.hidden_size - vectors
    )  # the embedding is looked up
    assert cost.operations == 2 * multiplied + 4 * 32 * 32 * 128
    assert cost.weight_bytes == 2 * (multiplied + vectors) + 2 * model.hidden_size
    assert cost.kv_bytes == 2 * 131_072  # one token read, one written


def test_prefill_equals_its_steps_in_operations_but_not_in_weight_bytes():
    model = resolve("default")
    head = 2 * model.vocab_size * model.hidden_size
    whole = step_cost(model, tokens=16)
    steps = [step_cost(model, past=i) for i in range(16)]
    assert whole.operations == sum(step.operations for step in steps) - 15 * head
    assert whole.weight_bytes < 1.01 * steps[0].weight_bytes


def test_a_batch_reads_the_weights_once_and_every_cache():
    model = resolve("default")
    one, many = step_cost(model, 1, past=100), step_cost(model, 16, past=100)
    assert many.kv_bytes == 16 * one.kv_bytes
    assert many.weight_bytes - one.weight_bytes == 15 * 576 * 2  # 15 more rows of the embedding
    assert many.operations == 16 * one.operations


def test_only_experts_in_use_are_read():
    model = resolve("mixtral-8x7b")
    experts = sum(m.parameters for m in model.matrices if m.name.startswith("experts"))
    one, many = step_cost(model), step_cost(model, 256)
    assert one.weight_bytes == pytest.approx(
        2 * (model.parameters - experts * 0.75 - model.vocab_size * 4096), rel=1e-3
    )
    assert many.weight_bytes == pytest.approx(
        2 * (model.parameters - model.vocab_size * 4096), rel=1e-3
    )


def test_at_the_break_even_batch_both_times_are_equal():
    model, bandwidth, flops = resolve("llama-3.1-8b"), 300e9, 60e12
    batch = compute_bound_batch(model, bandwidth, flops, past=64)
    below, at = (step_cost(model, rows, past=64) for rows in (batch - 1, batch))
    assert below.bytes / bandwidth > below.operations / flops
    assert at.bytes / bandwidth <= at.operations / flops
    assert (
        compute_bound_batch(model, bandwidth, flops, past=100_000) is None
    )  # reading the caches takes longer than all arithmetic


def test_the_roofline_is_the_longer_of_the_two():
    cost = step_cost(resolve("default"))
    assert cost.roofline_s(1e9, 1e18) == cost.bytes / 1e9
    assert cost.roofline_s(1e18, 1e9) == cost.operations / 1e9
    assert cost.intensity == cost.operations / cost.bytes


def test_the_price_of_a_million_tokens():
    assert money_per_million_tokens(3.6, 1000) == pytest.approx(1.0)
    with pytest.raises(BadRequest):
        money_per_million_tokens(1, 0)


def test_a_curve_is_exact_at_its_points_and_proportional_above():
    curve = Curve(((4, 0.4), (1, 0.1), (16, 0.4)))
    assert [curve(x) for x in (1, 4, 16)] == pytest.approx([0.1, 0.4, 0.4])
    assert curve(2) == pytest.approx(0.2) and curve(8) == pytest.approx(0.4)
    assert curve(32) == pytest.approx(0.8) and curve(0.5) == pytest.approx(0.1)
    with pytest.raises(BadRequest):
        Curve(())


def test_a_prediction_adds_up_the_operators():
    model = model_shape(
        {
            "model_type": "mistral",
            "hidden_size": 8,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 16,
            "vocab_size": 32,
            "sliding_window": 20,
        }
    )
    flat = lambda value: Curve(((1, value), (1024, value)))  # noqa: E731
    times = OperatorTimes(
        flat(0.1),
        flat(0.01),
        flat(0.001),
        {1: Curve(((10, 1e-4), (100, 1e-3)))},
        Curve(((10, 5e-4), (100, 5e-3))),
        flat(1e-5),
    )
    done = predict(model, times, batch=1, prompt_tokens=10, new_tokens=11)
    assert done.ttft_s == pytest.approx(3 * (0.1 + 0.001 + 5e-4) + 0.01 + 1e-5)
    # At the middle of the generation 16 keys are seen, fewer than the window of 20.
    assert done.tpot_s == pytest.approx(3 * (0.1 + 0.001 + 1.6e-4) + 0.01 + 1e-5)
    assert predict(model, times, prompt_tokens=100).parts_s["attention"] == pytest.approx(3 * 2e-4)


def test_products_are_fused_as_the_decoder_runs_them():
    from labkit.model.tiny import tiny_model

    model = tiny_model("llama")
    layer = model.layers[0]
    modules = (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down)
    assert fused_products(resolve(model.config)) == tuple(tuple(m.weight.shape) for m in modules)
    with pytest.raises(BadRequest, match="experts"):
        fused_products(resolve("mixtral-8x7b"))
