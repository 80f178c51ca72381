"""What `looking` shows is what attention computes: its weights times the values are the cache's own answer."""

from functools import partial

import pytest
import torch

from labkit.cache import CACHES, make_cache, quantized_cache, windowed_cache
from labkit.cache.quantized.blocks import decode
from labkit.errors import BadRequest
from labkit.plan.kv import KVShape, LayerKV
from labkit_course.experiments.attention_weights import Watched

SHAPE = KVShape.uniform(num_layers=1, num_kv_heads=2, head_dim=16)
KINDS = {
    "contiguous": CACHES["contiguous"],
    "int8": CACHES["int8"],
    "int4": CACHES["int4"],
    "int4_tensor": quantized_cache("int4_tensor"),
    "nvfp4": CACHES["nvfp4"],
    "before RoPE": quantized_cache("int4_prerope", torch.linspace(1, 0.1, 8)),
    "paged": CACHES["paged"],
    "window": windowed_cache(20, sinks=2),
    "observed": partial(CACHES["observed"], budget=40, recent=8),
}


def held_values(cache):
    if hasattr(cache, "packed"):
        slots = cache.bulks[0].slots
        held, part = cache.packed[0][1], cache.format.values
        per = {name: cache.slots // t.shape[2] for name, t in held.items()}
        packed = decode({n: t[:, :, : slots // per[n]] for n, t in held.items()}, part, 16)
        tail = max(cache.lengths) - cache.bulks[0].tokens
        return torch.cat([packed, cache.tails[0][1][:, :, :tail].float()], 2)
    return cache.dense(0)[1] if hasattr(cache, "dense") else cache.values[0][:, :, : cache.length]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [(3, 3), (3, 1)])
def test_weights_times_values_are_what_the_cache_answers(kind, counts):
    torch.manual_seed(0)
    watched = Watched(KINDS[kind](SHAPE, batch=2))
    for tokens, real in ((100, (100, 100)), (3, counts)):
        watched.advance(tokens, real)
        watched.append(0, torch.randn(2, 2, tokens, 16), torch.randn(2, 2, tokens, 16))
        before = watched.cache.length
        out = watched.attend(0, torch.randn(2, 4, tokens, 16))
    assert before == 103
    if kind == "observed":  # has dropped tokens since it answered; what is left still sums to one
        weights, _ = watched.weights(0)
        assert weights.sum(-1).allclose(torch.ones(2, 4), atol=1e-5)
        return
    weights, _ = watched.weights(0)  # [B, H, S]
    values = held_values(watched.cache).repeat_interleave(2, 1)  # [B, H, S, D]
    found = (weights[:, :, None] @ values)[:, :, 0]
    for row, count in enumerate(counts):
        assert found[row].allclose(out[row, :, count - 1], atol=2e-3), kind


def test_only_layers_with_keys_of_their_own_are_shown():
    shape = KVShape((LayerKV(2, 16), LayerKV(2, 16, shared_with=0), LayerKV(1, 16, latent_dim=8)))
    cache = CACHES["contiguous"](shape)
    cache.advance(1)
    for layer in (1, 2):
        with pytest.raises(BadRequest, match="keys of its own"):
            cache.cached_keys(layer)


def test_an_empty_slot_has_no_position_of_the_text():
    cache = make_cache("int4", SHAPE, batch=1)
    cache.advance(100)
    cache.append(0, torch.randn(1, 2, 100, 16), torch.randn(1, 2, 100, 16))
    cache.rewind(50)  # into the packed bulk: a short block
    keys, positions = cache.cached_keys(0)
    assert keys.shape[2] == positions.shape[1]
    assert sorted(p for p in positions[0].tolist() if p < 2**62) == list(range(50))


@pytest.mark.parametrize("tokens", [1, 40])
def test_keys_that_are_all_in_the_tail_are_shown(tokens):
    cache, keys = make_cache("int4", SHAPE, batch=1), torch.randn(1, 2, tokens, 16)
    cache.advance(tokens)
    cache.append(0, keys, keys)
    assert torch.equal(cache.cached_keys(0)[0], keys)


@pytest.mark.parametrize("kind", ["contiguous", "windowed", "paged", "int8", "int4", "observed"])
def test_attention_without_queries_is_an_error(kind):
    cache = make_cache(kind, SHAPE, batch=1)
    with pytest.raises(BadRequest, match="no tokens"):
        cache.cached_keys(0)
    for layer in (-1, 9, "0"):
        with pytest.raises(BadRequest, match="layer"):
            cache.cached_keys(layer)
    with pytest.raises(BadRequest, match="has no queries yet"):
        Watched(cache).weights(0)
