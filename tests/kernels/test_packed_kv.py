"""The INT8 cache kernel against the plain way: the same sums, whatever the shape, and nothing where it does not serve."""

import pytest
import torch

from labkit.cache import QuantizedCache
from labkit.kernels import packed_kv
from labkit.kernels.packed_kv import int8_scores, int8_sums
from labkit.plan.memory import KVShape


def tensors(B, K, R, D, slots, held):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (B, K, held, D), dtype=torch.uint8, generator=generator)
    scale, minimum = (torch.randn(B, K, held, 1, generator=generator).bfloat16() for _ in range(2))
    numbers = codes[:, :, :slots].float() * scale[:, :, :slots].float() + minimum[:, :, :slots].float()
    return torch.randn(B, K, R, D, generator=generator), codes, scale, minimum, numbers


@pytest.mark.parametrize(("B", "K", "R", "D", "slots", "held"), [
    (1, 3, 3, 64, 200, 256), (2, 2, 7, 16, 33, 33), (1, 1, 1, 48, 1, 4), (2, 4, 20, 128, 513, 600), (1, 2, 2, 80, 256, 256)])
@pytest.mark.parametrize("threads", [1, 2])
def test_scores_and_sums_are_those_of_the_numbers(instruction_set, B, K, R, D, slots, held, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        q, codes, scale, minimum, numbers = tensors(B, K, R, D, slots, held)
        out = torch.full((B, K, R, slots + 5), 7.0)  # a tail behind the slots is not touched
        assert int8_scores(q, codes, scale, minimum, out, slots)
        torch.testing.assert_close(out[..., :slots], q @ numbers.mT, atol=2e-2, rtol=1e-5)
        assert (out[..., slots:] == 7).all()
        weights = out.softmax(-1)
        torch.testing.assert_close(int8_sums(weights, codes, scale, minimum, slots), weights[..., :slots] @ numbers,
                                   atol=1e-3, rtol=1e-4)  # fmt: skip
    finally:
        torch.set_num_threads(before)


def test_a_cache_gives_the_same_with_and_without_it(instruction_set, monkeypatch):
    outs = []
    for off in (False, True):
        if off:
            monkeypatch.setenv("LABKIT_NATIVE", "off")
        cache, generator = QuantizedCache(KVShape.uniform(1, 2, 32), 2, 100, kv_format="int8"), torch.Generator().manual_seed(0)
        for tokens, counts in ((50, [50, 20]), (3, None), (1, None)):
            cache.advance(tokens, counts)
            cache.append(0, *(torch.randn(2, 2, tokens, 32, generator=generator) for _ in "kv"))
            out = cache.attend(0, torch.randn(2, 6, tokens, 32, generator=generator))
        outs.append(out)
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)


def test_it_says_so_where_it_does_not_serve(monkeypatch):
    q, codes, scale, minimum, _ = tensors(1, 2, 3, 20, 8, 8)  # D is no multiple of 16
    assert not int8_scores(q, codes, scale, minimum, torch.empty(1, 2, 3, 8), 8)
    assert int8_sums(torch.rand(1, 2, 3, 8), codes, scale, minimum, 8) is None
    monkeypatch.setenv("LABKIT_NATIVE", "off")
    assert packed_kv.kernel(torch.zeros(1, 1, 8, 64, dtype=torch.uint8)) is None
    monkeypatch.setenv("LABKIT_NATIVE", "auto")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert packed_kv.kernel(torch.zeros(1, 1, 8, 64, dtype=torch.uint8)) is None
