"""A config.json with odd values raises an error at once."""

from __future__ import annotations

import math

import pytest

from labkit.errors import BadRequest
from labkit.plan.shapes import model_shape

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
SPARSE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize("value", ["x", "64", [], {}, [1], -1, 1.5, math.nan, math.inf, True])
@pytest.mark.parametrize(
    "key",
    [
        "intermediate_size",
        "sliding_window",
        "max_position_embeddings",
        "decoder_sparse_step",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "max_window_layers",
        "num_kv_shared_layers",
        "q_lora_rank",
        "first_k_dense_replace",
    ],
)
def test_an_optional_field_that_is_not_a_number_raises_with_its_key(key, value):
    with pytest.raises(BadRequest, match=key):
        model_shape(SPARSE | {key: value})


def test_too_many_layers_raise_at_once():
    with pytest.raises(BadRequest, match="num_hidden_layers"):
        model_shape(LLAMA | {"num_hidden_layers": 10**30})


@pytest.mark.parametrize(
    "odd",
    [
        {"model_type": {}},
        {"model_type": ["llama"]},
        {"layer_types": 3},
        {"mlp_only_layers": "x"},
        {"num_kv_shared_layers": 4},
    ],
)
def test_other_odd_values_raise(odd):
    with pytest.raises(BadRequest):
        model_shape(LLAMA | odd)


def test_null_equals_a_missing_field():
    assert model_shape(LLAMA | {"sliding_window": None, "num_experts": None}) == model_shape(LLAMA)
