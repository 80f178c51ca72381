"""The contiguous cache against rows kept as lists, its growth, and its bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.cache import CACHES, ContiguousCache, make_cache
from labkit.cache import contiguous as module
from labkit.errors import BadRequest
from labkit.plan.memory import KVShape, LayerKV, kv_bytes

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["feed", "feed", "feed", "step", "rewind", "select"]), st.integers(0, 2**32 - 1)),
    min_size=1, max_size=12,
)


def run_operations(operations, shape, batch, capacity, make_oracle, feed):
    cache, oracle = ContiguousCache(shape, batch, capacity), make_oracle(shape, batch, heads=4)
    for name, seed in operations:
        generator = torch.Generator().manual_seed(seed)
        pick = lambda low, high, g=generator: int(torch.randint(low, high + 1, (), generator=g))  # noqa: E731
        if name in ("feed", "step"):
            tokens = 1 if name == "step" else pick(1, 12)
            counts = None if pick(0, 1) else [pick(0, tokens) for _ in range(cache.batch)]
            real = counts or [tokens] * cache.batch
            if max(real) == 0 or max(map(sum, zip(oracle.lengths(), real))) > capacity:
                before = cache.lengths
                with pytest.raises(BadRequest):
                    cache.advance(tokens, counts)
                assert cache.lengths == before
            else:
                feed(cache, oracle, tokens, counts, generator)
        elif name == "rewind":
            kept = [pick(0, held) for held in oracle.lengths()]
            cache.rewind(kept)
            oracle.rewind(kept)
        else:
            rows = [pick(0, cache.batch - 1) for _ in range(pick(1, 4))]
            cache.select(rows)
            oracle.select(rows)
        assert cache.lengths == oracle.lengths()
        check_bytes(cache, shape)


def check_bytes(cache, shape):
    everything = KVShape(tuple(LayerKV(layer.num_kv_heads, layer.head_dim) for layer in shape.layers))
    assert cache.nbytes() == kv_bytes(everything, cache.slots, cache.batch, kv_format="fp32")
    assert cache.nbytes_used() == sum(kv_bytes(everything, held, 1, kv_format="fp32") for held in cache.lengths)


SHAPES = {
    "uniform": KVShape.uniform(2, 2, 4),
    "windows": KVShape((LayerKV(2, 4, window=5), LayerKV(1, 8, window=4, sinks=2), LayerKV(4, 4))),
}


@pytest.fixture
def few_slots(monkeypatch):
    monkeypatch.setattr(module, "FIRST_SLOTS", 4)  # so that a short test grows often


@pytest.mark.parametrize("shape", SHAPES)
def test_random_operations_equal_rows_kept_as_lists(shape, few_slots, make_oracle, feed):
    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(OPERATIONS, st.integers(1, 3))
    def check(operations, batch):
        run_operations(operations, SHAPES[shape], batch, 40, make_oracle, feed)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_many_random_operations_equal_rows_kept_as_lists(shape, few_slots, make_oracle, feed):
    @settings(max_examples=400, deadline=None, derandomize=True, database=None)
    @given(OPERATIONS, st.integers(1, 4))
    def check(operations, batch):
        run_operations(operations, SHAPES[shape], batch, 40, make_oracle, feed)

    check()


def test_slots_double_and_a_capacity_below_the_next_doubling_is_taken_at_once(few_slots):
    cache, slots = ContiguousCache(SHAPES["uniform"], capacity=21), []
    for _ in range(21):
        cache.advance(1)
        slots.append(cache.slots)
    assert slots == [4] * 4 + [8] * 4 + [21] * 13
    with pytest.raises(BadRequest, match="capacity of 21"):
        cache.advance(1)


def test_without_a_capacity_it_grows_as_far_as_needed():
    cache = ContiguousCache(SHAPES["uniform"])
    cache.advance(5000)
    assert cache.slots >= 5000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("layers", "kv_heads", "head_dim"), [(1, 1, 8), (3, 2, 12), (36, 8, 128)])
def test_bytes_are_those_of_the_formula(dtype, layers, kv_heads, head_dim):
    shape = KVShape.uniform(layers, kv_heads, head_dim)
    cache = ContiguousCache(shape, batch=2, capacity=16, dtype=dtype)
    fmt = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    assert cache.nbytes() == kv_bytes(shape, 16, 2, kv_format=fmt)
    assert cache.nbytes_used() == 0
    cache.advance(7, [7, 3])
    assert cache.nbytes_used() == kv_bytes(shape, 7, 1, kv_format=fmt) + kv_bytes(shape, 3, 1, kv_format=fmt)


def test_a_layer_that_shares_stores_nothing_and_reads_the_others():
    shape = KVShape((LayerKV(2, 4), LayerKV(2, 4, shared_with=0)))
    cache = ContiguousCache(shape, capacity=8)
    assert cache.nbytes() == ContiguousCache(KVShape.uniform(1, 2, 4), capacity=8).nbytes() == kv_bytes(
        shape, 8, kv_format="fp32"
    )
    cache.advance(3)
    keys, values, queries = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 4, 3, 4)
    cache.append(0, keys, values)
    torch.testing.assert_close(cache.attend(1, queries), cache.attend(0, queries))
    with pytest.raises(ValueError, match="layer 0"):
        cache.append(1, keys, values)


def test_what_lies_behind_a_row_never_reaches_it():
    cache = ContiguousCache(SHAPES["uniform"], batch=2, capacity=8)
    cache.advance(8)
    poison = torch.full((2, 2, 8, 4), 1e30)
    cache.append(0, poison, poison)
    cache.rewind([0, 2])
    cache.advance(3, [3, 1])
    cache.append(0, torch.ones(2, 2, 3, 4), torch.ones(2, 2, 3, 4))
    assert cache.attend(0, torch.zeros(2, 4, 3, 4))[0].eq(1).all()


def test_the_registry_names_what_it_has():
    assert make_cache("none", SHAPES["uniform"]) is None
    assert isinstance(make_cache("contiguous", SHAPES["uniform"], 2), ContiguousCache)
    assert make_cache(ContiguousCache, SHAPES["uniform"], 2).batch == 2
    with pytest.raises(BadRequest, match=r"contiguos.*contiguous,.* none"):
        make_cache("contiguos", SHAPES["uniform"])
    assert {"none", "contiguous"} <= set(CACHES)
