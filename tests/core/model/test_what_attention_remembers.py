"""Check MHA, GQA, MQA, MLA and shared layers with a tiny model."""

import pytest
import torch

from labkit.errors import BadRequest
from labkit.generate import generate
from labkit.model.files.names import places
from labkit.model.mla import LatentAttention
from labkit.model.rope import rotate
from labkit.model.tiny import tiny_config, tiny_model
from labkit.plan.kv import kv_bytes, kv_bytes_per_token

SWITCHES = {
    "MHA": ({"num_kv_heads": 4}, 2 * 4 * 8 * 2),
    "GQA": ({"num_kv_heads": 2}, 2 * 2 * 8 * 2),
    "MQA": ({"num_kv_heads": 1}, 2 * 1 * 8 * 2),
    "MLA": ({"latent_dim": 12, "rope_dim": 4}, (12 + 4) * 2),
    "shared": ({"num_kv_heads": 4, "kv_shared": (None, 0)}, 2 * 4 * 8),
}
TOKENS = torch.randint(3, 96, (2, 21), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", SWITCHES)
def test_predicted_bytes_and_chunks_through_the_cache(name):
    change, numbers = SWITCHES[name]
    model = tiny_model(**change)
    with torch.inference_mode():
        whole, cache = model(TOKENS), model.new_cache(2, 32)
        pieces = torch.cat([model(piece, cache) for piece in TOKENS.split([9, 1, 4, 1, 6], 1)], 1)
    torch.testing.assert_close(pieces, whole, atol=1e-4, rtol=0)
    shape = model.config.kv_shape
    assert kv_bytes_per_token(shape, "fp32") == 4 * numbers
    assert cache.nbytes() == kv_bytes(shape, 32, 2, "fp32") == 2 * 32 * 4 * numbers
    assert cache.nbytes_used() == kv_bytes(shape, 21, 2, "fp32")


@pytest.mark.parametrize("name", SWITCHES)
def test_rows_of_unequal_length_equal_each_row_alone(name):
    model = tiny_model(**SWITCHES[name][0])
    prompts = [TOKENS[0, :3].tolist(), TOKENS[1].tolist(), TOKENS[0, 5:12].tolist()]
    together = generate(model, prompts, max_new_tokens=6, end_ids=())
    for prompt, got in zip(prompts, together):
        alone = generate(model, prompt, max_new_tokens=6, end_ids=(), cache="none")
        assert got.tokens == alone.tokens


def test_absorbed_weights_equal_separate_keys_and_values_per_head():
    config = tiny_config(latent_dim=12, rope_dim=4)
    layer, x = tiny_model(latent_dim=12, rope_dim=4).layers[0].attention, torch.randn(2, 7, 32)
    assert isinstance(layer, LatentAttention)
    angles = torch.arange(7)[:, None] * config.rope.frequencies(4)
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    q_plain, q_turn = layer.q(x).view(2, 7, 4, 12).transpose(1, 2).split((8, 4), -1)
    latent, key = layer.kv_down(x).split((12, 4), -1)
    latent = layer.kv_norm(latent)
    keys, values = (
        up(latent).view(2, 7, 4, 8).transpose(1, 2) for up in (layer.k_up, layer.v_up)
    )  # [B, H, T, D]
    turned = rotate(key[:, None], cos, sin).expand(2, 4, 7, 4)
    out = torch.nn.functional.scaled_dot_product_attention(
        torch.cat((q_plain, rotate(q_turn, cos, sin)), -1),
        torch.cat((keys, turned), -1),
        values,
        is_causal=True,
    )
    expected = layer.o(out.transpose(1, 2).reshape(2, 7, 32))
    torch.testing.assert_close(layer(x, cos, sin), expected, atol=1e-5, rtol=1e-5)


def test_a_shared_layer_reads_the_keys_of_another_layer():
    model = tiny_model(kv_shared=(None, 0))
    assert model.layers[1].attention.qkv.out_features == model.config.q_size
    with torch.inference_mode():
        before = model(TOKENS)
        model.layers[0].attention.qkv.weight[
            model.config.q_size :
        ] *= -1  # keys and values of layer 0
        assert (model(TOKENS) - before).abs().max() > 0.01


@pytest.mark.parametrize(
    "change",
    [
        {"kv_shared": (0, None)},
        {"kv_shared": (None,)},
        {"kv_shared": (None, 1)},
        {"latent_dim": 12},
        {"rope_dim": 4},
        {"latent_dim": 12, "rope_dim": 3},
    ],
)
def test_switches_that_exclude_each_other_raise_an_error(change):
    with pytest.raises(BadRequest):
        tiny_config(**change)


def test_checkpoints_cannot_have_these_switches():
    for name in ("MLA", "shared"):
        with pytest.raises(BadRequest, match="Only tiny models"):
            places(tiny_config(**SWITCHES[name][0]))
    for kind in ("windowed", "int8"):
        with pytest.raises(BadRequest, match="MLA"):
            tiny_model(latent_dim=12, rope_dim=4).new_cache(1, 8, kind)
