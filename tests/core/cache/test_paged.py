"""Blocks, tables, forks, copy-on-write, and attention through tables compared with a gather."""

import gc

import pytest
import torch

from labkit.cache.contiguous import ContiguousCache
from labkit.cache.paged.blocks import Blocks, PoolFull
from labkit.cache.paged.cache import PagedCache, paged_cache
from labkit.cache.paged.pool import PagePool
from labkit.errors import BadRequest
from labkit.kernels.native import build as native
from labkit.kernels.native.table_attention import MOST_QUERIES, Rows, table_attention
from labkit.kernels.reference import attention
from labkit.lab.measure.bytes import tensor_bytes
from labkit.plan.kv import KVShape, LayerKV, kv_bytes

SHAPE = KVShape.uniform(2, 2, 8)


def filled(cache, lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    cache.advance(max(lengths), list(lengths))
    for layer, spec in enumerate(cache.shape.layers):
        size = (cache.batch, spec.num_kv_heads, max(lengths), spec.head_dim)
        cache.append(layer, *(torch.randn(size, generator=generator) for _ in "kv"))
    return cache


def write(cache, number):
    """Append one token per row, with `number` everywhere."""
    cache.advance(1)
    for layer in range(2):
        cache.append(layer, *(torch.full((cache.batch, 2, 1, 8), float(number)) for _ in "kv"))


def content(cache, row=0):
    return cache.dense(1)[0][row, 0, : cache.lengths[row], 0].tolist()


# ---- blocks -----------------------------------------------------------------------------------------------------


def test_blocks_are_allocated_shared_and_released():
    blocks = Blocks(4, 16)
    taken = blocks.allocate(3)
    assert len(set(taken)) == 3 and (blocks.free, blocks.owned, blocks.total) == (1, 3, 4)
    blocks.share(taken[:1])
    assert blocks.release(taken) == taken[1:] and blocks.owned == 1
    assert blocks.release(taken[:1]) == taken[:1] and blocks.free == 4


def test_a_second_release_raises_and_no_block_is_allocated_twice():
    blocks = Blocks(4, 16)
    taken = blocks.allocate(2)
    with pytest.raises(BadRequest, match="not in use"):
        blocks.release([taken[0], taken[0]])
    assert blocks.owned == 2
    blocks.release(taken)
    for wrong in (taken, [9], [-1]):
        with pytest.raises(BadRequest, match="not in use"):
            blocks.release(wrong)
        with pytest.raises(BadRequest, match="not in use"):
            blocks.share(wrong)
    assert sorted(blocks.allocate(4)) == [0, 1, 2, 3] and blocks.free == 0


def test_a_full_pool_raises_and_allocates_nothing():
    blocks = Blocks(4, 16)
    blocks.allocate(2)
    with pytest.raises(PoolFull, match="3 blocks are needed and 2 of 4"):
        blocks.allocate(3)
    assert blocks.free == 2 and len(blocks.allocate(2)) == 2


def test_extend_copies_a_block_only_while_another_table_has_it():
    blocks = Blocks(8, 4)
    shared = blocks.allocate(2)
    blocks.share(shared)
    one, two = list(shared), list(shared)
    assert blocks.extend([one, two], [6, 6], [1, 1]) == [
        (1, 2)
    ]  # the second table then has the block alone
    assert (one, two) == ([0, 2], [0, 1]) and blocks.owned == 3
    assert blocks.extend([one, two], [8, 8], [0, 5]) == [] and two == [0, 1, 3, 4]
    assert blocks.extend([one], [8], [0]) == [] and one == [0, 2]
    with pytest.raises(PoolFull):
        blocks.extend([one, two], [8, 16], [9, 9])
    assert (one, two, blocks.free) == ([0, 2], [0, 1, 3, 4], 3)


@pytest.mark.parametrize(("total", "size"), [(0, 16), (4, 0), (-1, 16), (4, 1.5), (True, 16)])
def test_invalid_pools_raise(total, size):
    with pytest.raises(BadRequest):
        Blocks(total, size)


# ---- forks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["parent", "child"])
@pytest.mark.parametrize("cached", [5, 6, 7, 8])
def test_forks_diverge_and_do_not_change_each_other(first, cached):
    pool = PagePool(SHAPE, 16, 4)
    parent = PagedCache.over(pool)
    for number in range(cached):
        write(parent, number)
    child = parent.fork()
    assert pool.owned == 2  # nothing was copied
    order = [(parent, 100), (child, 200)] if first == "parent" else [(child, 200), (parent, 100)]
    for cache, number in order + order:
        write(cache, number)
    assert content(parent) == [*range(cached), 100, 100]
    assert content(child) == [*range(cached), 200, 200]
    parent.rewind(0)
    assert content(child) == [*range(cached), 200, 200]
    child.rewind(0)
    assert pool.free == pool.total


def test_a_shared_full_block_is_copied_after_a_rewind_into_it():
    pool = PagePool(SHAPE, 16, 4)
    parent = PagedCache.over(pool)
    for number in range(8):
        write(parent, number)
    child = parent.fork()
    child.rewind(2)
    write(child, 50)
    assert content(parent) == [*range(8)] and content(child) == [0, 1, 50]


def test_rows_that_share_a_block_copy_it_one_after_another():
    pool = PagePool(SHAPE, 3, 4)  # exactly enough for three rows
    cache = PagedCache.over(pool)
    for number in range(2):
        write(cache, number)
    cache.select([0, 0, 0])
    write(cache, 7)
    assert pool.free == 0 and len({table[0] for table in cache.tables}) == 3
    assert all(content(cache, row) == [0, 1, 7] for row in range(3))


def test_select_fork_and_join_share_and_release():
    pool = PagePool(SHAPE, 20, 4)
    cache = filled(PagedCache.over(pool, 3), [9, 4, 1])
    rows = [content(cache, row) for row in range(3)]
    other = cache.fork([2, 0])
    joined = PagedCache.join([other, cache])
    assert joined.lengths == (1, 9, 9, 4, 1) and pool.owned == 5
    assert [content(joined, row) for row in range(5)] == [rows[2], rows[0], *rows]
    cache.select([1])
    other.rewind(0)
    assert pool.owned == 5 and content(cache) == rows[1]
    joined.rewind(0)
    assert pool.owned == 1
    with pytest.raises(BadRequest, match="same pool"):
        PagedCache.join([cache, PagedCache(SHAPE)])
    with pytest.raises(BadRequest, match="same pool"):
        PagedCache.join([])


def test_a_deleted_cache_releases_its_blocks():
    pool = PagePool(SHAPE, 8, 4)
    cache = filled(PagedCache.over(pool), [9])
    twin = cache.fork()
    del cache
    gc.collect()
    assert pool.owned == 3
    del twin
    gc.collect()
    assert pool.free == 8


def test_a_full_pool_raises_before_anything_is_written():
    pool = PagePool(SHAPE, 4, 4)
    cache, other = filled(PagedCache.over(pool, 2), [7, 3]), PagedCache.over(pool)
    before = [content(cache, row) for row in range(2)]
    tables = [list(table) for table in cache.tables]
    with pytest.raises(PoolFull):
        cache.advance(6, [2, 6])
    assert (cache.lengths, cache.tables, pool.free) == ((7, 3), tables, 1)
    assert [content(cache, row) for row in range(2)] == before
    with pytest.raises(PoolFull):
        other.advance(5)
    assert other.lengths == (0,) and pool.free == 1
    twin = cache.fork()  # needs no block, but its first writes do
    with pytest.raises(PoolFull):
        twin.advance(1)
    cache.rewind([4, 0])
    twin.advance(1)
    assert twin.lengths == (8, 4)


def test_pools_of_another_model_dtype_or_format_raise():
    pool = PagePool(SHAPE, 4)
    for shape, dtype in (
        (KVShape.uniform(2, 2, 4), torch.float32),
        (KVShape.uniform(3, 2, 8), torch.float32),
        (SHAPE, torch.bfloat16),
    ):
        with pytest.raises(BadRequest, match="another model"):
            PagedCache(shape, dtype=dtype, pool=pool)
    for name in ("int4", "nvfp4", "int2", "bf16", "int8_prerope", "int5"):
        with pytest.raises(BadRequest):
            PagePool(SHAPE, 4, kv_format=name)
    with pytest.raises(BadRequest, match="latents"):
        PagePool(KVShape((LayerKV(1, 8, latent_dim=8, rope_dim=4),)), 4, kv_format="int8")


# ---- bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_format", "name"),
    [(None, "fp32"), ("int8", "int8"), ("int4_g32", "int4_g32"), ("fp8", "fp8")],
)
def test_bytes_equal_the_formula_in_whole_pages(kv_format, name):
    shape, lengths = KVShape.uniform(3, 2, 64), [1, 16, 17, 100]
    cache = filled(paged_cache(kv_format=kv_format)(shape, 4), lengths)
    pool = cache.pool
    assert pool.owned * pool.block_bytes == sum(
        kv_bytes(shape, n, kv_format=name, page=16) for n in lengths
    )
    assert cache.nbytes_used() == sum(kv_bytes(shape, n, kv_format=name) for n in lengths)
    assert (
        cache.nbytes()
        == pool.nbytes()
        == tensor_bytes(cache.pool.layers)
        == pool.total * pool.block_bytes
    )
    assert cache.waste == pytest.approx(1 - sum(lengths) / (16 * sum(-(-n // 16) for n in lengths)))
    twin = cache.fork()
    assert (
        PagedCache.join([cache, twin]).nbytes_used() == cache.nbytes_used()
    )  # shared blocks count once


def test_latents_and_shared_layers_equal_the_contiguous_cache():
    shape = KVShape(
        (LayerKV(2, 8), LayerKV(2, 8, shared_with=0), LayerKV(4, 6, latent_dim=10, rope_dim=4))
    )
    paged, dense = PagedCache(shape, 2, block=4), ContiguousCache(shape, 2)
    generator = torch.Generator().manual_seed(0)
    for tokens, counts in ((9, [9, 5]), (1, None), (20, [3, 20])):
        paged.advance(tokens, counts), dense.advance(tokens, counts)
        for layer, (heads, width) in ((0, (2, 8)), (2, (1, 14))):
            new = [torch.randn(2, heads, tokens, width, generator=generator) for _ in "kv"]
            paged.append(layer, *new), dense.append(layer, *new)
        for layer, width in ((0, 8), (1, 8), (2, 14)):
            q = torch.randn(2, 4, tokens, width, generator=generator)
            for row, count in enumerate(counts or (1, 1)):
                torch.testing.assert_close(
                    paged.attend(layer, q)[row, :, :count], dense.attend(layer, q)[row, :, :count]
                )
    with pytest.raises(ValueError, match="append to that one"):
        paged.append(1, *new)


# ---- attention --------------------------------------------------------------------------------------------------


def paged_and_dense(lengths, T, heads, kv_heads, D, size, kv_format, dtype, window=None, sinks=0):
    """Return the outputs of the kernel and the reference for the newest T tokens of each row."""
    shape = KVShape((LayerKV(kv_heads, D, window, sinks),))
    cache = PagedCache(shape, len(lengths), None, dtype, block=size, kv_format=kv_format)
    filled(cache, [max(n - T, 1) for n in lengths])
    counts = [min(T, n - 1) if n > 1 else 1 for n in lengths]
    generator = torch.Generator().manual_seed(1)
    cache.advance(T, counts)
    cache.append(0, *(torch.randn(len(lengths), kv_heads, T, D, generator=generator) for _ in "kv"))
    q = torch.randn(len(lengths), heads, T, D, generator=generator).to(dtype)
    sides = cache.pool.layers[0]
    rows = Rows(cache.step.starts, cache.step.counts, cache._tables_tensor())
    out = table_attention(q, *sides, rows, None, window, sinks)
    keys, values = cache.dense(0)
    expected = attention(
        q.float(),
        keys.float(),
        values.float(),
        cache.step.positions,
        torch.arange(cache.length),
        window,
        sinks,
    )
    real = torch.tensor([[t < count for t in range(T)] for count in counts])
    return out, expected.to(dtype), real


@pytest.mark.parametrize(
    ("lengths", "T", "heads", "kv_heads", "D", "size"),
    [
        ([1], 1, 3, 1, 64, 16),
        ([700, 3, 256], 1, 9, 3, 64, 16),
        ([257, 16, 17], 1, 4, 4, 128, 16),
        ([40, 5], 4, 6, 3, 20, 4),
        ([600, 31], 16, 9, 3, 64, 16),
        ([300, 9], 2, 8, 1, 16, 512),
        ([33, 2, 1], 3, 5, 5, 8, 1),
    ],
)
@pytest.mark.parametrize(
    ("kv_format", "dtype"), [(None, torch.float32), (None, torch.bfloat16), ("int8", torch.float32)]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernel_equals_attention_over_the_gathered_cache(
    instruction_set, lengths, T, heads, kv_heads, D, size, kv_format, dtype, threads
):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, expected, real = paged_and_dense(
            lengths, T, heads, kv_heads, D, size, kv_format, dtype
        )
    finally:
        torch.set_num_threads(before)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        out.transpose(1, 2)[real], expected.transpose(1, 2)[real], atol=bound, rtol=bound
    )
    assert not out.transpose(1, 2)[~real].any()


@pytest.mark.parametrize(
    ("window", "sinks"), [(5, 0), (5, 2), (1, 0), (300, 0), (300, 4), (10_000, 0)]
)
@pytest.mark.parametrize("T", [1, 7])
def test_the_kernel_applies_windows_and_sinks(instruction_set, window, sinks, T):
    out, expected, real = paged_and_dense(
        [700, 30, 301], T, 4, 2, 16, 16, None, torch.float32, window, sinks
    )
    torch.testing.assert_close(
        out.transpose(1, 2)[real], expected.transpose(1, 2)[real], atol=1e-5, rtol=1e-5
    )


def test_other_rows_and_threads_do_not_change_the_result(instruction_set):
    alone, _, _ = paged_and_dense([700], 1, 9, 3, 64, 16, None, torch.float32)
    shape = KVShape.uniform(1, 3, 64)
    cache = filled(PagedCache(shape, 1), [700])
    q = torch.randn(1, 9, 1, 64)
    outs, before = [], torch.get_num_threads()
    for rows, threads in (([0], 1), ([0], 2), ([0, 0, 0], 2), ([0], 2)):
        torch.set_num_threads(threads)
        cache.select(rows)
        fork = cache.fork()
        fork.advance(1)
        fork.append(0, *(torch.ones(len(rows), 3, 1, 64) for _ in "kv"))
        outs.append(fork.attend(0, q.expand(len(rows), -1, -1, -1))[-1])
    torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_large_scores_and_far_keys_stay_finite(instruction_set):
    shape = KVShape.uniform(1, 1, 16)
    cache = PagedCache(shape, 1)
    cache.advance(600)
    keys = torch.zeros(1, 1, 600, 16)
    keys[:, :, 3] = 1e4  # one dominant key: every other weight underflows
    values = torch.arange(600.0)[None, None, :, None].expand(1, 1, 600, 16)
    cache.append(0, keys, values)
    cache.advance(1)
    cache.append(0, torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 16))
    assert cache.attend(0, torch.ones(1, 1, 1, 16)).unique().tolist() == [3.0]
    assert cache.attend(0, -torch.ones(1, 1, 1, 16)).isfinite().all()


def test_the_fallback_equals_the_kernel(monkeypatch):
    outs = []
    for setting in ("auto", "off"):
        monkeypatch.setenv("LABKIT_NATIVE", setting)
        for kv_format in (None, "int8", "fp8"):
            cache = filled(PagedCache(SHAPE, 3, block=4, kv_format=kv_format), [9, 2, 30])
            cache.advance(3, [3, 0, 2])
            cache.append(0, torch.ones(3, 2, 3, 8), torch.ones(3, 2, 3, 8))
            outs.append(cache.attend(0, torch.linspace(-1, 1, 3 * 4 * 3 * 8).view(3, 4, 3, 8)))
    for with_kernel, without in zip(outs[:3], outs[3:]):
        for row, count in enumerate((3, 0, 2)):
            one, other = with_kernel[row, :, :count], without[row, :, :count]
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_the_kernel_returns_none_for_calls_that_it_does_not_support(monkeypatch):
    cache = filled(PagedCache(SHAPE, 1), [3])
    cache.advance(1)
    rows = Rows((3,), (1,), cache._tables_tensor())
    call = lambda q, sides=cache.pool.layers[0]: table_attention(q, *sides, rows)  # noqa: E731
    assert call(torch.randn(1, 4, 1, 8)) is not None or native.compiler() is None
    assert call(torch.randn(1, 4, MOST_QUERIES + 1, 8)) is None
    for kv_format in ("int8_token_sym", "int4_g32", "int8_g32", "fp8"):
        assert (
            call(torch.randn(1, 4, 1, 8), PagePool(SHAPE, 2, kv_format=kv_format).layers[0]) is None
        )
    assert call(torch.randn(1, 4, 1, 8), PagePool(SHAPE, 2, dtype=torch.float16).layers[0]) is None
    monkeypatch.setenv("LABKIT_NATIVE", "off")
    assert call(torch.randn(1, 4, 1, 8)) is None
