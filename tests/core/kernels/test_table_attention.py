"""Test table attention over a contiguous cache: one block per row, in each number format."""

import pytest
import torch

from labkit.cache import QuantizedCache, make_cache
from labkit.kernels.native.table_attention import MOST_QUERIES, Rows, table_attention
from labkit.kernels.reference import attention
from labkit.plan.kv import KVShape


def side(kind, B, K, slots, D, generator):
    """Return the input of the kernel, and the numbers that it represents."""
    if kind != "int8":
        numbers = torch.randn(B, K, slots, D, generator=generator).to(kind)
        return {"numbers": numbers}, numbers.float()
    codes = torch.randint(0, 256, (B, K, slots, D), dtype=torch.uint8, generator=generator)
    scale = (torch.rand(B, K, slots, 1, generator=generator) / 100).bfloat16()
    minimum = torch.randn(B, K, slots, 1, generator=generator).bfloat16()
    numbers = codes.float() * scale.float() + minimum.float()
    return {"codes": codes, "scale": scale, "minimum": minimum}, numbers


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, "int8"])
@pytest.mark.parametrize(
    ("K", "G", "T", "D", "starts", "counts", "slots"),
    [
        (3, 3, 1, 64, [199], [1], 256),
        (2, 2, 5, 16, [30, 0], [5, 3], 40),
        (1, 1, 1, 48, [0], [1], 4),
        (4, 1, 16, 128, [497, 100], [16, 16], 600),
        (2, 2, 3, 20, [253, 300], [3, 0], 310),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_attention_over_the_numbers(
    instruction_set, K, G, T, D, starts, counts, slots, kind, threads
):
    generator, B, before = torch.Generator().manual_seed(0), len(starts), torch.get_num_threads()
    (keys, k), (values, v) = (side(kind, B, K, slots, D, generator) for _ in "kv")
    q = torch.randn(B, K * G, T, D, generator=generator)
    torch.set_num_threads(threads)
    try:
        out = table_attention(q, keys, values, Rows(starts, counts))
    finally:
        torch.set_num_threads(before)
    positions = torch.tensor(starts)[:, None] + torch.arange(T)
    expected = attention(q, k, v, positions, torch.arange(slots))
    for b, count in enumerate(counts):
        torch.testing.assert_close(out[b, :, :count], expected[b, :, :count], atol=3e-4, rtol=1e-4)
        assert not out[b, :, count:].any()


def test_a_cache_gives_the_same_with_and_without_it(instruction_set, monkeypatch):
    outs = []
    for off in (False, True):
        if off:
            monkeypatch.setenv("LABKIT_NATIVE", "off")
        cache = QuantizedCache(KVShape.uniform(1, 2, 32), 2, 100, kv_format="int8")
        generator = torch.Generator().manual_seed(0)
        for tokens, counts in ((50, [50, 20]), (3, None), (1, None)):
            cache.advance(tokens, counts)
            cache.append(0, *(torch.randn(2, 2, tokens, 32, generator=generator) for _ in "kv"))
            outs.append(cache.attend(0, torch.randn(2, 6, tokens, 32, generator=generator)))
    for with_kernel, without in zip(outs[1:3], outs[4:]):
        torch.testing.assert_close(with_kernel, without, atol=1e-5, rtol=1e-5)


def test_it_returns_none_for_calls_that_it_does_not_support(monkeypatch):
    keys, _ = side("int8", 1, 2, 8, 20, torch.Generator().manual_seed(0))
    rows = Rows([7], [1])
    assert table_attention(torch.randn(1, 2, MOST_QUERIES + 1, 20), keys, keys, rows) is None
    assert table_attention(torch.randn(1, 2, 1, 20).to("meta"), keys, keys, rows) is None
    for name, value in (("LABKIT_NATIVE", "off"), ("CXX", "no-such-compiler")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            if name == "CXX":
                patch.setenv("LABKIT_CACHE", "/nonexistent")
            assert table_attention(torch.randn(1, 2, 1, 20), keys, keys, rows) is None


@pytest.mark.parametrize("kind", ["int8", "paged"])
@pytest.mark.parametrize("length, tokens", [(27, 2), (69, 5), (130, 5), (257, 3), (300, 9)])
def test_a_pass_over_several_tokens_equals_single_steps_to_the_bit(kind, length, tokens):
    """Otherwise speculative decoding could choose another token than plain decoding at a near-tie."""
    shape, generator = KVShape.uniform(1, 3, 64), torch.Generator().manual_seed(length)
    keys, values, queries = (
        torch.randn(1, heads, length, 64, generator=generator) for heads in (3, 3, 9)
    )
    before = length - tokens

    def attended(*sizes):
        cache, at, outs = make_cache(kind, shape, capacity=length), 0, []
        for size in (before, *sizes):
            cache.advance(size)
            cache.append(0, keys[:, :, at : at + size], values[:, :, at : at + size])
            outs.append(cache.attend(0, queries[:, :, at : at + size]))
            at += size
        return torch.cat(outs[1:], 2)

    assert torch.equal(attended(*[1] * tokens), attended(tokens))
