"""A fingerprint changes if and only if keys and values may change."""

from dataclasses import replace

import pytest
import torch

from labkit.model.fingerprint import fingerprint
from labkit.model.native.decoder import accelerate, unsupported_reason
from labkit.model.tiny import tiny_model
from labkit.quant.apply import quantize_model


def test_a_changed_model_has_another_fingerprint():
    plain = fingerprint(tiny_model())
    assert plain == fingerprint(tiny_model()) and plain != fingerprint(tiny_model(), adapters=["X"])
    changed = tiny_model()
    changed.layers[1].attention.qkv.weight.data[0, 0] += 1e-3
    rope = replace(tiny_model().config.rope, theta=123456.0)
    others = [
        changed,
        tiny_model(seed=1),
        tiny_model(dtype=torch.bfloat16),
        tiny_model(rope=rope),
        tiny_model("qwen3"),
    ]
    assert len({fingerprint(model) for model in others} | {plain}) == len(others) + 1


def test_formats_and_packed_numbers_change_the_fingerprint():
    found = set()
    for recipe in (None, "int8", "int4"):
        for seed in (0, 1):
            model = tiny_model(seed=seed, hidden_size=64, intermediate_size=64, head_dim=16)
            if recipe:
                quantize_model(model, recipe)
            found.add(fingerprint(model))
    assert len(found) == 6


def test_native_and_plain_decoder_have_different_fingerprints():
    models = [
        tiny_model(seed=seed, hidden_size=64, intermediate_size=64, head_dim=16) for seed in (0, 1)
    ]
    if unsupported_reason(models[0].config, "int8"):
        pytest.skip(unsupported_reason(models[0].config, "int8"))
    found = {fingerprint(model) for model in models} | {
        fingerprint(accelerate(model, "int8")) for model in models
    }
    assert len(found) == 4
