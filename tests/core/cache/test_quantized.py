"""The quantized cache: its bytes, error bounds and stability, and tensors with outliers."""

from dataclasses import replace

import pytest
import torch

from labkit.cache import QuantizedCache, make_cache, quantized_cache
from labkit.cache.quantized.attention import cos_sin, rotate
from labkit.cache.quantized.blocks import decode, encode, layout
from labkit.errors import BadRequest
from labkit.generate import generate
from labkit.kernels.reference import attention
from labkit.lab.measure.bytes import peak_memory, tensor_bytes
from labkit.model.tiny import tiny_model
from labkit.plan.kv import KVShape, LayerKV, kv_bytes
from labkit.plan.kv_formats import KV_FORMATS, KVFormat, get_kv_format

PACKED = [name for name, fmt in KV_FORMATS.items() if fmt.packed]
every_format = pytest.mark.parametrize("name", PACKED)
FREQUENCIES = 0.5 ** torch.arange(32)


def fill(cache, tokens, seed=0, chunks=None):
    """Append random tokens; return the keys and values of layer 0 [B, K, T, D]."""
    generator, first = torch.Generator().manual_seed(seed), []
    for size in chunks or [tokens]:
        cache.advance(size)
        for i, spec in enumerate(cache.shape.layers):
            new = [
                torch.randn(
                    cache.batch, spec.num_kv_heads, size, spec.head_dim, generator=generator
                )
                for _ in "kv"
            ]
            cache.append(i, *new)
            if i == 0:
                first.append(new)
    return [torch.cat(side, 2) for side in zip(*first)]


def decoded(cache, layer=0, row=0):
    """Return the decoded keys and values, tail included, in order of position: [K, T, D] each."""
    sides = []
    bulk = cache.bulks[row]
    positions = bulk.positions(bulk.slots)
    for side, part in enumerate((cache.format.keys, cache.format.values)):
        packed = {}
        for name, t in cache.packed[layer][side].items():
            per = cache.slots // t.shape[2]
            packed[name] = t[row : row + 1, :, : bulk.slots // per]
        numbers = decode(packed, part, cache.shape.layers[layer].head_dim)[0][:, positions < 2**62]
        tail = cache.tails[layer][side][row, :, : cache.lengths[row] - bulk.tokens].float()
        sides.append(torch.cat([numbers, tail], 1))
    return sides


@every_format
@pytest.mark.parametrize(
    "shape",
    [
        KVShape.uniform(2, 3, 64),
        KVShape((LayerKV(1, 20), LayerKV(2, 7), LayerKV(2, 64, shared_with=0))),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_predicted_bytes_equal_measured_bytes(name, shape, dtype):
    fmt = replace(get_kv_format(name), tail_bits=8 * dtype.itemsize)
    for tokens in (1, 40, 64, 65, 192, 200):
        cache = QuantizedCache(shape, 2, tokens, dtype, kv_format=name)
        fill(cache, tokens) if len(shape.layers) == 2 else cache.advance(tokens)
        assert cache.nbytes_used() == kv_bytes(shape, tokens, 2, fmt)
        assert tensor_bytes(cache.packed, cache.tails) == cache.nbytes() >= cache.nbytes_used()
        if tokens - fmt.packed_tokens(tokens) == min(
            tokens, fmt.tail
        ):  # the tail is full: exactly that size is allocated
            assert cache.nbytes() == kv_bytes(shape, tokens, 2, fmt)


def test_bytes_at_2048_tokens_are_below_the_limits():
    shape = KVShape.uniform(30, 3, 64)
    plain = kv_bytes(shape, 2048, 1, "bf16")
    for name, bar in (("int8", 0.55), ("int4", 0.33)):
        cache = make_cache(name, shape, 1, 2048, torch.bfloat16)
        cache.advance(2048)
        assert cache.nbytes() == kv_bytes(shape, 2048, 1, name) <= bar * plain


@every_format
def test_errors_are_at_most_half_a_step_and_zeros_are_exact(name):
    generator = torch.Generator().manual_seed(0)
    for part in (get_kv_format(name).keys, get_kv_format(name).values):
        for size in (1e-6, 1.0, 1e4):
            x = torch.randn(2, 3, 64, 20, generator=generator) * size
            x[0, :, :32] = 0
            assert {n: tuple(t.shape) for n, t in encode(x, part).items()} == {
                n: (2, s.heads, 64 // s.per, s.width) for n, s in layout(part, 3, 20).items()
            }
            back = decode(encode(x, part), part, 20)
            assert back.isfinite().all() and (back[0, :, :32] == 0).all() or part.axis == "tensor"
            if part.code == "int":  # no group has a wider range than the whole tensor
                levels = (1 << part.bits) - (1 if part.zero_bits else 2)
                assert (back - x).abs().max() <= 0.52 * 2 * x.abs().max() / levels
            else:
                assert (back - x).abs().max() <= x.abs().max() * (
                    0.07 if part.code == "fp8" else 0.26
                )


def test_the_step_follows_the_range_of_the_group():
    """4 bits store 0 to 15 exactly, also with a minimum far from zero, and constants are exact."""
    part = get_kv_format("int4").values  # per token
    x = torch.stack(
        [torch.arange(16.0), torch.arange(16.0) - 32, torch.full((16,), 5.0), torch.zeros(16)]
    )[None, None]
    packed = encode(x, part)
    assert packed["codes"][0, 0, 0].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert torch.equal(decode(packed, part, 16), x)
    keys = get_kv_format("int4").keys  # per channel of 32 tokens
    y = torch.arange(32.0)[:, None].floor_divide(2).expand(32, 3) * torch.tensor([1.0, 100.0, 0.0])
    assert torch.equal(decode(encode(y[None, None], keys), keys, 3)[0, 0], y)


@pytest.mark.parametrize("name", ["int4", "int2", "nvfp4", "int4_tensor", "int8"])
def test_repeated_rewinds_into_the_packed_part_change_no_remaining_token(name):
    cache = QuantizedCache(KVShape.uniform(1, 2, 16), 1, 400, kv_format=name)
    fill(cache, 200)
    before = decoded(cache)
    for time in range(12):
        cache.rewind(150 - 9 * time)
        now = decoded(cache)
        for a, b in zip(before, now):
            assert torch.equal(a[:, : cache.length], b)
        fill(cache, 90, seed=time)
        before = decoded(cache)
        assert before[0].shape[1] == cache.length
    assert cache.bulks[0].short or name == "int8"


def test_select_moves_the_whole_state_of_a_row_and_shares_no_memory():
    cache = QuantizedCache(KVShape.uniform(1, 2, 16), 3, 300, kv_format="int4")
    fill(cache, 200)
    cache.rewind([150, 200, 90])
    fill(cache, 60)
    before, frozen = [decoded(cache, row=row) for row in range(3)], cache.bulks[0].tokens
    cache.select([2, 0, 0])
    after = [decoded(cache, row=row) for row in range(3)]
    for row, source in enumerate([2, 0, 0]):
        assert all(torch.equal(a, b) for a, b in zip(after[row], before[source]))
    cache.rewind([10, 20, 210])
    fill(cache, 80, seed=5)
    assert all(
        torch.equal(a[:, :frozen], b[:, :frozen]) for a, b in zip(decoded(cache, row=2), before[0])
    )


def with_outliers(tokens=96):
    generator = torch.Generator().manual_seed(3)
    keys, values, queries = (
        torch.randn(1, heads, tokens, 16, generator=generator) for heads in (2, 2, 4)
    )
    keys[..., 0] = 1e3 + keys[..., 0]  # a channel that is large in every token
    keys[..., 1] *= 1e-2
    queries[..., 0] *= 1e-3
    values[..., 2] = 0
    return keys, values, queries


def error(name, keys, values, queries, dtype=torch.float32):
    cache = QuantizedCache(KVShape.uniform(1, 2, 16), 1, 96, dtype, kv_format=name)
    cache.advance(95)
    cache.append(0, keys[:, :, :95].to(dtype), values[:, :, :95].to(dtype))
    cache.advance(1)
    cache.append(0, keys[:, :, 95:].to(dtype), values[:, :, 95:].to(dtype))
    out = cache.attend(0, queries[:, :, 95:].to(dtype)).float()
    assert out.isfinite().all()
    expected = attention(queries[:, :, 95:], keys, values, torch.tensor([95]), torch.arange(96))
    return float((out - expected).abs().max())


@every_format
def test_outlier_channels_zero_channels_and_huge_keys_give_finite_results(name):
    keys, values, queries = with_outliers()
    assert error(name, keys, values, queries) < 3
    assert error(name, keys * 1e4, values, queries * 1e-4) < 3
    assert error(name, keys, torch.zeros_like(values), queries) == 0
    error(name, keys, values, queries, torch.bfloat16)


def test_a_scale_per_channel_handles_outliers_better_than_one_per_token():
    channel, token, tensor = (
        error(name, *with_outliers()) for name in ("int4", "int4_token", "int4_tensor")
    )
    assert 4 * channel < token and 4 * channel < tensor


@pytest.mark.parametrize("name", ["int8", "int4", "nvfp4", "int4_prerope"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 3), (28, 4), (5, 1), (3, 3)])
@pytest.mark.parametrize("tokens", [1, 40])
def test_adjacent_query_heads_share_a_kv_head(name, heads, kv_heads, tokens):
    cache = QuantizedCache(
        KVShape.uniform(1, kv_heads, 64), 2, 200, kv_format=name, frequencies=FREQUENCIES
    )
    for new in (100, tokens):
        cache.advance(new)
        values = torch.arange(kv_heads).float()[None, :, None, None].expand(2, kv_heads, new, 64)
        cache.append(0, torch.randn(2, kv_heads, new, 64), values)
    out = cache.attend(0, torch.randn(2, heads, tokens, 64))[0, :, -1, 0]
    assert out.round().int().tolist() == [
        head for head in range(kv_heads) for _ in range(heads // kv_heads)
    ]


def test_a_rewind_after_an_interrupted_pass_leaves_all_layers_equal_in_length():
    cache, twin = (
        QuantizedCache(KVShape.uniform(3, 2, 16), 1, 300, kv_format="int4") for _ in range(2)
    )
    for one in (cache, twin):
        fill(one, 64)
    cache.advance(40)
    cache.append(
        0, torch.full((1, 2, 40, 16), 9.0), torch.full((1, 2, 40, 16), 9.0)
    )  # then the pass stops with an error
    cache.rewind(64)
    for one in (cache, twin):
        fill(one, 80, seed=1)
    assert cache.lengths == twin.lengths
    for layer in (0, 1, 2):
        for a, b in zip(decoded(cache, layer), decoded(twin, layer)):
            assert a.shape == b.shape and (a - b).abs().max() < 1.0


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "nvfp4"])
def test_a_batch_generates_the_same_tokens_as_its_rows_alone(kind):
    model = tiny_model(num_kv_heads=2, head_dim=16)
    prompts = [list(range(3, 90)), [5, 6, 7], list(range(20, 70))]
    together = generate(model, prompts, max_new_tokens=20, end_ids=(), cache=kind)
    for prompt, got in zip(prompts, together):
        assert (
            got.tokens == generate(model, prompt, max_new_tokens=20, end_ids=(), cache=kind).tokens
        )
    if kind == "int8":
        plain = generate(model, prompts[1], max_new_tokens=20, end_ids=())
        assert (
            generate(model, prompts[1], max_new_tokens=20, end_ids=(), cache=kind).tokens[:4]
            == plain.tokens[:4]
        )


def test_quantizing_before_rope_is_better_for_constant_keys():
    """A key that is constant over tokens is exact before RoPE; after RoPE it varies."""
    model = tiny_model(head_dim=16)
    frequencies = model.rotary.config.frequencies(16)
    key = torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(1)).expand(1, 2, 96, 16)
    rotated = rotate(key, *cos_sin(torch.arange(96), frequencies))
    errors, keys, values = {}, get_kv_format("int2").keys, get_kv_format("int8").values
    for before in (False, True):
        cache = quantized_cache(KVFormat("x", keys, values, 64, before_rope=before), frequencies)(
            KVShape.uniform(1, 2, 16), 1, 96
        )
        cache.advance(96)
        cache.append(0, rotated, rotated)
        query = torch.randn(1, 2, 96, 16, generator=torch.Generator().manual_seed(0))
        expected = attention(query, rotated, rotated, torch.arange(96), torch.arange(96))
        errors[before] = (cache.attend(0, query) - expected).abs().mean()
    assert errors[True] < 0.25 * errors[False]


def test_invalid_formats_raise():
    shape = KVShape.uniform(1, 2, 16)
    for name, words in [
        ("bf16", "no scales"),
        ("int4_prerope", "frequencies"),
        ("int5", "not known"),
    ]:
        with pytest.raises(BadRequest, match=words):
            QuantizedCache(shape, kv_format=name)
    with pytest.raises(BadRequest, match="not known"):
        quantized_cache("int99")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_attention_needs_the_working_memory_of_one_layer(name):
    shape = KVShape.uniform(16, 4, 64)
    cache = QuantizedCache(shape, 1, 16384, torch.bfloat16, kv_format=name)
    for _ in range(16):
        fill(cache, 1024)
    one_layer = 2 * 4 * 64 * 16384 * 4  # keys and values of a layer in float32
    query = torch.randn(1, 12, 1, 64, dtype=torch.bfloat16)
    new = torch.randn(1, 4, 1, 64, dtype=torch.bfloat16)
    cache.rewind(16000)
    with peak_memory() as peak:
        for _ in range(3):
            cache.advance(1)
            for layer in range(16):
                cache.append(layer, new, new)
                cache.attend(layer, query)
    assert peak.grown_bytes <= one_layer, (peak, cache.nbytes())
    assert cache.nbytes() < 0.6 * kv_bytes(shape, 16384, 1, "bf16")
