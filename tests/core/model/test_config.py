"""Read a config.json: defaults, older keys, and errors for unsupported settings."""

from __future__ import annotations

import pytest

from labkit.errors import BadRequest
from labkit.model.config import ModelConfig
from labkit.model.rope import RopeConfig
from labkit.model.tiny import tiny_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 96,
}


def test_head_dim_is_derived_only_if_the_config_does_not_state_it():
    assert ModelConfig.from_hf(LLAMA).head_dim == 8
    assert ModelConfig.from_hf(LLAMA | {"head_dim": None}).head_dim == 8
    assert ModelConfig.from_hf(LLAMA | {"head_dim": 16}).q_size == 128
    qwen = LLAMA | {"model_type": "qwen3", "num_key_value_heads": 8}
    assert ModelConfig.from_hf(qwen).head_dim == 128  # Qwen3's own default


def test_without_a_number_of_kv_heads_each_query_head_has_its_own():
    for settings in ({}, {"num_key_value_heads": None}):
        config = ModelConfig.from_hf(LLAMA | settings)
        assert config.num_kv_heads == 8
    shape = ModelConfig.from_hf(LLAMA | {"num_key_value_heads": 2}).kv_shape
    assert [(layer.num_kv_heads, layer.head_dim, layer.window) for layer in shape.layers] == [
        (2, 8, None)
    ] * 2


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=5e5),
        RopeConfig("linear", factor=2.0),
        RopeConfig("llama3", 5e5, 8.0, 128, low_freq_factor=1.5, high_freq_factor=5.0),
        RopeConfig("yarn", 1e4, 4.0, 128, beta_fast=16.0, attention_factor=1.2, truncate=False),
    ],
    ids=lambda rope: rope.kind,
)
def test_from_hf_is_the_inverse_of_to_hf(architecture, rope):
    config = tiny_config(architecture, rope=rope, tie_embeddings=True, eos_ids=(2, 5))
    assert ModelConfig.from_hf(config.to_hf()) == config
    older = {key: value for key, value in config.to_hf().items() if key != "rope_parameters"}
    assert ModelConfig.from_hf(older) == config


def test_the_older_key_of_the_rope_type_is_read():
    settings = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}
    assert ModelConfig.from_hf(settings).rope == RopeConfig("linear", 5e5, 4.0)


def test_each_architecture_has_its_own_windowed_layers():
    qwen = LLAMA | {
        "model_type": "qwen2",
        "num_key_value_heads": 8,
        "sliding_window": 5,
        "max_window_layers": 1,
    }
    assert ModelConfig.from_hf(qwen).windows is None
    assert ModelConfig.from_hf(qwen | {"use_sliding_window": True}).windows == (None, 5)
    assert ModelConfig.from_hf(LLAMA | {"model_type": "mistral"}).windows == (4096, 4096)
    assert (
        ModelConfig.from_hf(LLAMA | {"model_type": "mistral", "sliding_window": None}).windows
        is None
    )
    layers = ModelConfig.from_hf(qwen | {"use_sliding_window": True}).kv_shape.layers
    assert [layer.window for layer in layers] == [None, 5]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"model_type": "mamba"}, r"'mamba'.*llama, mistral, qwen2, qwen3.*labkit\.lab\.hf"),
        ({"model_type": None}, r"None.*labkit\.lab\.hf"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"'dynamic'.*labkit\.lab\.hf"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}},
            r"mscale is 0\.7.*labkit\.lab\.hf",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            r"'longrope'.*yarn.*labkit\.lab\.hf",
        ),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5.*labkit\.lab\.hf"),
        ({"hidden_act": "gelu"}, r"'gelu'.*labkit\.lab\.hf"),
        ({"num_key_value_heads": 3}, "8 query heads cannot share 3"),
        ({"head_dim": 7}, "head_dim is 7.*even"),
        ({"head_dim": 0}, "head_dim = 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0"),
    ],
)
def test_settings_that_are_not_supported_raise_an_error(settings, names):
    with pytest.raises(BadRequest, match=names):
        ModelConfig.from_hf(LLAMA | settings)
