"""Compare the KV formula with published numbers and with sums over layers and positions."""

import random

import pytest

from labkit.errors import BadRequest
from labkit.plan.kv import KVShape, LayerKV, kv_bytes, kv_bytes_per_token
from labkit.plan.kv_formats import KV_FORMATS, KVFormat, Part, get_kv_format

MIB = 2**20


def test_head_dim_of_the_config_is_used_and_not_hidden_size_over_heads():
    assert kv_bytes_per_token(KVShape.uniform(36, 8, 128), "bf16") == 147_456
    assert (
        kv_bytes_per_token(KVShape.uniform(36, 8, 2560 // 32), "bf16") == 92_160
    )  # a widely copied mistake


def test_mla_stores_the_latent_once_and_one_rotary_part():
    layer = LayerKV(1, 512, latent_dim=512, rope_dim=64)
    assert kv_bytes_per_token(KVShape((layer,) * 61), "bf16") == 70_272  # not 2 x 512: 124,928
    assert kv_bytes(KVShape((layer,)), 65_536, kv_format="bits4") == 18 * MIB


def test_int8_with_its_scales_needs_more_than_half_the_bytes():
    shape = KVShape.uniform(28, 8, 128)
    assert kv_bytes(shape, 128_000, kv_format="fp16") == 14_000 * MIB
    assert kv_bytes(shape, 128_000, kv_format="int8") == 7_218.75 * MIB
    assert get_kv_format("q8_0").bytes_per_value(128) == 1.0625


def test_bytes_are_proportional_to_kv_heads():
    mha, gqa, mqa = (kv_bytes(KVShape.uniform(32, heads, 128), 4096) for heads in (32, 8, 1))
    assert mha == 4 * gqa == 32 * mqa == 2 * 2**30


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 9, 40])
def test_bytes_of_mixed_layers_equal_a_count_over_positions(tokens):
    layers = (
        LayerKV(2, 8, window=4),
        LayerKV(2, 8),
        LayerKV(1, 16, window=4, sinks=2),
        LayerKV(2, 8, shared_with=1),
    )
    held = 0
    for layer in layers:
        if layer.shared_with is not None:
            continue
        for position in range(tokens):
            age = tokens - 1 - position  # 0: the newest
            if layer.window is None or age < layer.window or position < layer.sinks:
                held += 2 * layer.num_kv_heads * layer.head_dim * 2
    assert kv_bytes(KVShape(layers), tokens, 1, "bf16") == held
    assert kv_bytes(KVShape(layers), tokens, 3, "bf16") == 3 * held
    assert kv_bytes_per_token(KVShape(layers)) == 2 * 2 * 8 * 2  # only layer 1 still grows


def test_a_window_stores_exactly_its_size():
    layer = LayerKV(1, 1, window=8)
    assert [layer.stored_tokens(n) for n in (7, 8, 9, 100)] == [7, 8, 8, 8]


def test_pages_equal_a_count_over_positions():
    source = random.Random(0)
    for _ in range(300):
        tokens, page = source.randrange(0, 80), source.choice([1, 3, 16])
        layer = LayerKV(
            1, 1, window=source.choice([None, 1, 5, 16, 33]), sinks=source.choice([0, 2])
        )
        kept = [
            p
            for p in range(tokens)
            if layer.window is None or p >= tokens - layer.window or p < layer.sinks
        ]
        assert layer.paged_tokens(tokens, page) == len({p // page for p in kept}) * page, (
            layer,
            tokens,
            page,
        )


def test_pages_need_at_least_the_unpadded_bytes():
    shape = KVShape.uniform(2, 2, 8, window=20)
    assert kv_bytes(shape, 37, page=16) >= kv_bytes(shape, 37)
    assert kv_bytes(KVShape.uniform(1, 1, 1), 17, page=16) == kv_bytes(KVShape.uniform(1, 1, 1), 32)


def test_a_tail_stays_in_full_precision_and_whole_blocks_are_packed():
    int4 = get_kv_format("int4")
    assert [int4.packed_tokens(n) for n in (0, 64, 65, 96, 97, 2048)] == [0, 0, 32, 32, 64, 1984]
    shape = KVShape.uniform(1, 1, 128)
    assert kv_bytes(shape, 64, kv_format="int4") == kv_bytes(shape, 64, kv_format="fp16")
    keys = 32 * 64 + 128 * 4  # codes, and scale and minimum of each channel
    values = 32 * 64 + 32 * 4  # codes, and scale and minimum of each token
    assert kv_bytes(shape, 96, kv_format="int4") == keys + values + 64 * 128 * 2 * 2
    assert kv_bytes_per_token(shape, "int4") == (keys + values) / 32
    assert kv_bytes(KVShape.uniform(30, 3, 64), 2048, kv_format="int4") < 0.33 * kv_bytes(
        KVShape.uniform(30, 3, 64), 2048
    )


def test_scales_of_blocks_are_counted_once_per_block():
    shape = KVShape.uniform(1, 2, 64)
    values = 32 * 2 * (32 + 4)  # codes, and a scale and minimum per token and head
    grown = kv_bytes(shape, 128, kv_format="int4_tensor") - kv_bytes(
        shape, 96, kv_format="int4_tensor"
    )
    assert grown == 32 * 2 * 32 + 4 + values  # keys: one scale and minimum for both heads
    grown = kv_bytes(shape, 128, kv_format="nvfp4") - kv_bytes(shape, 96, kv_format="nvfp4")
    assert grown == 2 * (32 * 2 * (32 + 4) + 4)  # 4.5 bits per number, and one float32 per block


def test_prerope_adds_no_bytes_and_needs_a_quantized_format():
    shape = KVShape.uniform(2, 2, 64)
    assert get_kv_format("int4_prerope").before_rope
    assert kv_bytes(shape, 500, kv_format="int4_prerope") == kv_bytes(shape, 500, kv_format="int4")
    with pytest.raises(BadRequest, match="bf16_prerope"):
        get_kv_format("bf16_prerope")
    with pytest.raises(BadRequest, match="at least 31"):
        KVFormat("x", Part(4, "channel", 32, 16, 16), Part(4, "token", None, 16, 16), tail=30)


@pytest.mark.parametrize("name", sorted(KV_FORMATS))
def test_growth_per_token_is_the_growth_of_the_total(name):
    shape = KVShape((LayerKV(2, 24), LayerKV(2, 24, window=16), LayerKV(3, 8)))
    block = get_kv_format(name).block
    start = 10 * 64
    grown = kv_bytes(shape, start + 64, kv_format=name) - kv_bytes(shape, start, kv_format=name)
    assert kv_bytes_per_token(shape, name) == pytest.approx(grown / 64)
    assert 64 % block == 0


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: LayerKV(0, 64), "at least 1"),
        (lambda: LayerKV(1, 64, window=0), "window is 0"),
        (lambda: KVShape((LayerKV(1, 1, shared_with=0),)), "own cache"),
        (lambda: KVShape((LayerKV(1, 1), LayerKV(1, 1, shared_with=7))), "Layer 1 reads layer 7"),
        (lambda: kv_bytes(KVShape.uniform(1, 1, 1), -1), "tokens is -1"),
        (lambda: kv_bytes(KVShape.uniform(1, 1, 1), 1, page=0), "page is 0"),
        (lambda: kv_bytes(KVShape.uniform(1, 1, 1), 1, kv_format="int5"), "int5"),
    ],
)
def test_values_that_are_not_valid_raise(make, words):
    with pytest.raises(BadRequest, match=words):
        make()
