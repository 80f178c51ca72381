"""Caches that evict tokens: which tokens stay, their positions, and rewinds that raise."""

import pytest
import torch

from labkit.cache import CACHES
from labkit.cache.eviction import EvictingCache, KeyNorm, Observed
from labkit.errors import BadRequest
from labkit.generate import generate
from labkit.kernels.reference import attention
from labkit.model.tiny import tiny_model
from labkit.plan.kv import KVShape, LayerKV, kv_bytes

SHAPE = KVShape.uniform(2, 2, 8)
# Every eviction rule of the registry.
METHODS = [
    rule for rule in CACHES.values() if isinstance(rule, type) and issubclass(rule, EvictingCache)
]
every_method = pytest.mark.parametrize("method", METHODS)


def maker(method, **options):
    return lambda shape, batch=1, capacity=None, dtype=torch.float32, device="cpu": method(
        shape, batch, capacity, dtype, device, **options
    )


def push(cache, keys, values, queries, chunks, counts=None):
    at, outs = 0, []
    for size in chunks:
        cache.advance(size, counts)
        part = slice(at, at + size)
        for layer in range(cache.shape.num_layers):
            cache.append(layer, keys[:, :, part], values[:, :, part])
            out = cache.attend(layer, queries[:, :, part])
        outs.append(out)
        at += size
    return torch.cat(outs, 2)


def random(tokens, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, tokens, 8, generator=generator) for heads in (2, 2, 4)]


def positions(cache, layer=0, row=0):
    return [p for p in cache.positions[layer][row].tolist() if p < 2**62]


@every_method
@pytest.mark.parametrize("chunks", [[20], [1] * 20, [8, 1, 11]])
def test_sinks_and_newest_tokens_stay_with_their_own_keys(method, chunks):
    keys, values, queries = random(20)
    cache = method(SHAPE, budget=8, sinks=2, recent=6)
    push(cache, keys, values, queries, chunks)
    for layer in (0, 1):
        assert positions(cache, layer) == [0, 1, *range(14, 20)]
        assert torch.equal(cache.keys[layer], keys[:, :, positions(cache, layer)])
        assert torch.equal(cache.values[layer], values[:, :, positions(cache, layer)])
    assert cache.length == 20
    query, new = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 1, 8)
    cache.advance(1)
    cache.append(0, new, new)
    at = torch.tensor([*positions(cache)])
    expected = attention(
        query,
        torch.cat([keys[:, :, at[:-1]], new], 2),
        torch.cat([values[:, :, at[:-1]], new], 2),
        torch.tensor([20]),
        at,
    )
    torch.testing.assert_close(cache.attend(0, query), expected)


def test_key_norm_keeps_small_keys_and_observed_keeps_attended_keys():
    keys, values, queries = random(12)
    keys[:, :, [3, 7]] *= 0.01
    cache = KeyNorm(SHAPE, budget=4, sinks=1, recent=1)
    push(cache, keys, values, queries, [12])
    assert positions(cache) == [0, 3, 7, 11]
    keys, values, queries = random(12)
    queries[..., 0], keys[..., 0] = 4.0, 0.0
    keys[:, :, [5, 8], 0] = 4.0  # every query attends to these
    cache = Observed(SHAPE, budget=4, sinks=1, recent=1)
    push(cache, keys, values, queries, [6, 6])
    assert positions(cache) == [0, 5, 8, 11]


def test_a_dominant_first_key_stays_with_one_sink():
    """Only trained models put most attention on their first token, so this key is made by hand."""
    keys, values, queries = random(40)
    keys[:, :, 0], queries[..., 0] = 0, 6.0
    keys[:, :, 0, 0] = 6.0
    whole = attention(queries, keys, values, torch.arange(40), torch.arange(40))[:, :, -1]
    near, far = (
        push(KeyNorm(SHAPE, budget=8, sinks=s, recent=4), keys, values, queries, [1] * 40)[:, :, -1]
        for s in (1, 0)
    )
    assert (near - whole).abs().max() < 0.02 < (far - whole).abs().max()


@every_method
def test_a_sufficient_budget_is_exact_and_a_small_one_treats_rows_independently(method):
    model = tiny_model()
    prompts = [[5, 6, 7], list(range(3, 40)), [9] * 12]
    expected = generate(model, prompts, max_new_tokens=8, end_ids=())
    got = generate(
        model,
        prompts,
        max_new_tokens=8,
        end_ids=(),
        cache=maker(method, budget=64),
        prefill_chunk=16,
    )
    assert [c.tokens for c in got] == [c.tokens for c in expected]
    small = generate(
        model,
        prompts,
        max_new_tokens=8,
        end_ids=(),
        cache=maker(method, budget=6, sinks=1, recent=2),
    )
    alone = [
        generate(
            model, p, max_new_tokens=8, end_ids=(), cache=maker(method, budget=6, sinks=1, recent=2)
        )
        for p in prompts
    ]
    assert [c.tokens for c in small] == [c.tokens for c in alone]


@every_method
def test_bytes_are_bounded_and_equal_the_formula(method):
    cache = method(SHAPE, budget=8, sinks=2, recent=2)
    for tokens in (3, 8, 8):
        push(cache, *random(tokens), [tokens])
        stored = min(cache.length, 8)
        assert (
            cache.nbytes()
            == cache.nbytes_used()
            == kv_bytes(SHAPE, stored, 1, "fp32") + 2 * stored * 12
        )


@every_method
def test_select_moves_whole_rows_and_a_rewind_past_an_eviction_raises(method):
    keys, values, queries = random(12, batch=3)
    cache = method(SHAPE, 3, budget=6, sinks=1, recent=1)
    push(cache, keys, values, queries, [12], [12, 4, 9])
    before = [(positions(cache, 0, row), cache.notes[0][row].clone()) for row in range(3)]
    cache.select([2, 0, 0])
    assert cache.lengths == (9, 12, 12)
    for row, source in enumerate([2, 0, 0]):
        assert positions(cache, 0, row) == before[source][0] and torch.equal(
            cache.notes[0][row], before[source][1]
        )
        n = len(positions(cache, 0, row))
        assert torch.equal(cache.keys[0][row, :, :n], keys[source][:, positions(cache, 0, row)])
    cache.keys[0][1] += 1  # rows must not share memory
    assert not torch.equal(cache.keys[0][1], cache.keys[0][2])
    with pytest.raises(BadRequest, match="dropped some at 12"):
        cache.rewind([9, 11, 12])
    assert cache.lengths == (9, 12, 12)
    cache.rewind([0, 12, 0])
    assert positions(cache, 0, 0) == [] and len(positions(cache, 0, 1)) == 6
    cache.rewind(0)
    assert cache.nbytes_used() == 0


@every_method
def test_shared_and_mla_layers_raise(method):
    for layers in (
        (LayerKV(2, 8), LayerKV(2, 8, shared_with=0)),
        (LayerKV(1, 8, latent_dim=8, rope_dim=4),),
    ):
        with pytest.raises(BadRequest, match="share|MLA"):
            method(KVShape(layers))
