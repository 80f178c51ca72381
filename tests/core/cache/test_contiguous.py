"""The contiguous cache: its growth, its bytes and its masking.

`test_random_operations` compares it with rows stored as lists.
"""

import pytest
import torch

from labkit.cache import CACHES, ContiguousCache, make_cache
from labkit.errors import BadRequest
from labkit.plan.kv import KVShape, LayerKV, kv_bytes

SHAPE = KVShape.uniform(2, 2, 4)


@pytest.fixture
def few_slots(monkeypatch):
    monkeypatch.setattr(ContiguousCache, "first_slots", 4)  # so that a short test grows often


def test_slots_double_and_the_last_step_allocates_the_whole_capacity(few_slots):
    cache, slots = ContiguousCache(SHAPE, capacity=21), []
    for _ in range(21):
        cache.advance(1)
        slots.append(cache.slots)
    assert slots == [4] * 4 + [8] * 4 + [21] * 13
    with pytest.raises(BadRequest, match="capacity of 21"):
        cache.advance(1)


def test_without_a_capacity_it_grows_as_far_as_needed():
    cache = ContiguousCache(SHAPE)
    cache.advance(5000)
    assert cache.slots >= 5000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("layers", "kv_heads", "head_dim"), [(1, 1, 8), (3, 2, 12), (36, 8, 128)])
def test_bytes_equal_the_formula(dtype, layers, kv_heads, head_dim):
    shape = KVShape.uniform(layers, kv_heads, head_dim)
    cache = ContiguousCache(shape, batch=2, capacity=16, dtype=dtype)
    fmt = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    assert cache.nbytes() == kv_bytes(shape, 16, 2, kv_format=fmt)
    assert cache.nbytes_used() == 0
    cache.advance(7, [7, 3])
    assert cache.nbytes_used() == kv_bytes(shape, 7, 1, kv_format=fmt) + kv_bytes(
        shape, 3, 1, kv_format=fmt
    )


def test_a_shared_layer_stores_nothing_and_reads_the_other_layer():
    shape = KVShape((LayerKV(2, 4), LayerKV(2, 4, shared_with=0)))
    cache = ContiguousCache(shape, capacity=8)
    assert (
        cache.nbytes()
        == ContiguousCache(KVShape.uniform(1, 2, 4), capacity=8).nbytes()
        == kv_bytes(shape, 8, kv_format="fp32")
    )
    cache.advance(3)
    keys, values, queries = (
        torch.randn(1, 2, 3, 4),
        torch.randn(1, 2, 3, 4),
        torch.randn(1, 4, 3, 4),
    )
    cache.append(0, keys, values)
    torch.testing.assert_close(cache.attend(1, queries), cache.attend(0, queries))
    with pytest.raises(ValueError, match="layer 0"):
        cache.append(1, keys, values)


def test_slots_after_the_end_of_a_row_do_not_change_its_output():
    cache = ContiguousCache(SHAPE, batch=2, capacity=8)
    cache.advance(8)
    poison = torch.full((2, 2, 8, 4), 1e30)
    cache.append(0, poison, poison)
    cache.rewind([0, 2])
    cache.advance(3, [3, 1])
    cache.append(0, torch.ones(2, 2, 3, 4), torch.ones(2, 2, 3, 4))
    assert cache.attend(0, torch.zeros(2, 4, 3, 4))[0].eq(1).all()


def test_the_registry_makes_caches_by_name():
    assert make_cache("none", SHAPE) is None
    assert isinstance(make_cache("contiguous", SHAPE, 2), ContiguousCache)
    assert make_cache(ContiguousCache, SHAPE, 2).batch == 2
    with pytest.raises(BadRequest, match=r"contiguos.*contiguous,.* none"):
        make_cache("contiguos", SHAPE)
    assert {"none", "contiguous"} <= set(CACHES)
