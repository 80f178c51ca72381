"""Recipes side by side: break-even from curves, and predictions and measurements of every recipe."""

import pytest
import torch

from labkit.errors import BadRequest
from labkit.formats import DTYPES, torch_dtype
from labkit.lab.measure.bytes import tensor_bytes
from labkit.lab.plan.memory import resolve
from labkit.model.tiny import tiny_model
from labkit.plan.weights import weight_bytes
from labkit.quant import quantize_model
from labkit_course.experiments import recipes


def test_break_even_is_where_the_curves_cross():
    batches, steady = (1, 4, 16, 32), [1.0, 1.0, 1.0, 1.0]
    assert recipes.break_even(batches, [0.25, 1.0, 4.0, 8.0], steady) == 4
    assert recipes.break_even(batches, [1 / 8, 4 / 8, 16 / 8, 32 / 8], steady) == 8, (
        "between two batches"
    )
    assert recipes.break_even(batches, [0.1] * 4, steady) is None
    assert recipes.break_even(batches, [0.25, 1.0, 4.0, 8.0], steady, most=3) is None
    with pytest.raises(BadRequest, match="different lengths"):
        recipes.break_even(batches, [1.0], steady)


def test_fewer_bytes_are_a_lower_bound_in_time():
    shape = resolve("smollm2-135m")
    seconds = [recipes.roofline_s(shape, name, 20e9) for name in ("fp32", "bf16", "int8", "int4")]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == pytest.approx(2 * seconds[1], rel=0.01)


@pytest.mark.filterwarnings("ignore:.*packed kernel")
def test_each_recipe_is_predicted_and_measured():
    models = {}
    for name in ("fp32", "int8", "int4"):
        models[name] = tiny_model(hidden_size=64, intermediate_size=128, vocab_size=128).to(
            torch_dtype(recipes.kv_format(name))
        )
        if name not in DTYPES:
            quantize_model(models[name], name)
    shape = resolve(models["fp32"].config)
    assert tensor_bytes(models["fp32"]) == weight_bytes(shape, "fp32")
    steps = recipes.batch_steps(models, (1, 3), past=4, repeats=1, steps=2)
    fills = recipes.prefill_times(models, 8, repeats=1)
    decoded = recipes.decode_times(models, prompt_tokens=4, new_tokens=3, repeats=1)
    for name in models:
        assert len(steps[name]) == 2 and fills[name].median_s > 0 and decoded[name].median_s > 0


def test_operators_are_timed_in_the_recipes_own_layers(monkeypatch):
    from labkit.lab.bench import operators
    from labkit.quant import QuantizedLinear

    monkeypatch.setattr(operators, "BUDGET_S", 0.0)
    monkeypatch.setattr(operators, "cold_copies", lambda layer_bytes: 2)
    seen = []
    real = operators._layers
    monkeypatch.setattr(
        operators,
        "_layers",
        lambda shapes, make: seen.extend(real(shapes, make)) or real(shapes, make),
    )
    shape = resolve(tiny_model(hidden_size=64, intermediate_size=128, vocab_size=128).config)
    times = recipes.recipe_operators(shape, "int8", max_rows=32, max_batch=32)
    assert (
        all(isinstance(linear, QuantizedLinear) for layer in seen for linear in layer)
        and len(seen) == 2
    )
    assert {rows for rows, _ in times.products.points} == {1, 4, 16, 17, 32}
    steps = recipes.predicted_steps(shape, times, [1, 17], past=4)
    assert all(second > 0 for second in steps) and recipes.predicted_prefill(shape, times, 32) > 0
    assert torch.is_inference_mode_enabled() is False
