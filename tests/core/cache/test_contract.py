"""The contract of every exact cache: lengths, positions, masks, rewind, select and errors."""

import pytest
import torch

from labkit.cache import EXACT, make_cache
from labkit.errors import BadRequest
from labkit.kernels.reference import attention
from labkit.plan.kv import KVShape, LayerKV

KINDS = EXACT
SHAPE = KVShape.uniform(2, 2, 8)

pytestmark = pytest.mark.parametrize("kind", KINDS)


def filled(kind, tokens, batch=1, shape=SHAPE, capacity=64):
    """Return a cache in which token s of row b has the value 100 b + s in every layer."""
    cache = make_cache(kind, shape, batch, capacity)
    cache.advance(tokens)
    for layer, spec in enumerate(shape.layers):
        numbers = (
            torch.arange(tokens).float()[None, :] + 100 * torch.arange(batch)[:, None]
        )  # [B, T]
        content = numbers[:, None, :, None].expand(batch, spec.num_kv_heads, tokens, spec.head_dim)
        cache.append(layer, content, content)
    return cache


def mean_seen(cache, new=1000.0):
    """Append one token of value `new` per row and return the mean of all visible values: [L, B].

    Queries of zero make attention a mean.
    """
    cache.advance(1)
    means = []
    for layer, spec in enumerate(cache.shape.layers):
        token = torch.full((cache.batch, spec.num_kv_heads, 1, spec.head_dim), new)
        cache.append(layer, token, token)
        means.append(cache.attend(layer, torch.zeros(cache.batch, 4, 1, spec.head_dim))[:, 0, 0, 0])
    return torch.stack(means)  # [L, B]


def assert_unchanged(cache, lengths):
    assert cache.lengths == lengths
    expected = [
        (1000 + sum(100 * row + s for s in range(n))) / (n + 1) for row, n in enumerate(lengths)
    ]
    torch.testing.assert_close(mean_seen(cache), torch.tensor([expected] * cache.shape.num_layers))


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_rewind_keeps_exactly_the_first_tokens_in_every_layer(kind, keep):
    cache = filled(kind, 3)
    cache.rewind(keep)
    assert (cache.length, cache.lengths, cache.nbytes_used() == 0) == (keep, (keep,), keep == 0)
    assert_unchanged(cache, (keep,))


@pytest.mark.parametrize("keep", [4, 5, -1, [4], [-1], [1, 1], [], True, 1.5, "2", None])
def test_an_invalid_rewind_raises_and_changes_nothing(kind, keep):
    cache = filled(kind, 3)
    with pytest.raises(BadRequest):
        cache.rewind(keep)
    assert_unchanged(cache, (3,))


def test_rewind_per_row_changes_no_row_if_one_is_not_valid(kind):
    cache = filled(kind, 3, batch=3)
    with pytest.raises(BadRequest, match="Row 1 has 3 tokens"):
        cache.rewind([0, 4, 1])
    assert cache.lengths == (3, 3, 3)
    cache.rewind([0, 3, 1])
    assert (cache.lengths, cache.length) == ((0, 3, 1), 3)
    with pytest.raises(BadRequest):  # one number for all must not let a row grow
        cache.rewind(2)
    assert_unchanged(cache, (0, 3, 1))


def test_tokens_written_after_a_rewind_replace_the_old_ones(kind):
    cache = filled(kind, 5)
    cache.rewind(2)
    assert mean_seen(cache, 9.0)[:, 0].tolist() == pytest.approx([(0 + 1 + 9) / 3] * 2)
    assert mean_seen(cache, 9.0)[:, 0].tolist() == pytest.approx([(0 + 1 + 9 + 9) / 4] * 2)


def test_selected_rows_do_not_share_memory(kind):
    cache = filled(kind, 4, batch=3)
    cache.rewind([4, 2, 3])
    cache.select([2, 0, 0])
    assert cache.lengths == (3, 4, 4)
    row2, row0 = [200, 201, 202], [0, 1, 2, 3]
    cache.rewind([3, 1, 4])  # row 1 changes; row 2, its copy, must not
    expected = [sum([*row2, 1000]) / 4, (0 + 1000) / 2, sum([*row0, 1000]) / 5]
    torch.testing.assert_close(mean_seen(cache), torch.tensor([expected] * 2))
    cache.select([2])
    expected = [sum([*row0, 1000, 7]) / 6]
    torch.testing.assert_close(mean_seen(cache, 7.0), torch.tensor([expected] * 2))


@pytest.mark.parametrize("rows", [[], [3], [-1], [0, True], [0.0], ["0"]])
def test_selecting_rows_that_do_not_exist_raises(kind, rows):
    cache = filled(kind, 3, batch=3)
    with pytest.raises(BadRequest):
        cache.select(rows)
    assert_unchanged(cache, (3, 3, 3))


def test_a_full_cache_raises_before_anything_is_written(kind):
    cache = filled(kind, 3, batch=2, capacity=4)
    cache.rewind([3, 2])
    for tokens, counts in [(2, None), (2, [2, 1]), (5, None)]:
        with pytest.raises(BadRequest, match="full"):
            cache.advance(tokens, counts)
        assert cache.lengths == (3, 2)
    cache.advance(2, [1, 2])  # the padding needs no room
    assert cache.lengths == (4, 4)


COUNTS = [(0, None), (-1, None), (2, [1]), (2, [3, 0]), (2, [-1, 1]), (1, [0, 0]), (2, [1, 1.0])]


@pytest.mark.parametrize(("tokens", "counts"), COUNTS)
def test_invalid_counts_raise(kind, tokens, counts):
    cache = filled(kind, 2, batch=2)
    with pytest.raises(BadRequest):
        cache.advance(tokens, counts)
    assert_unchanged(cache, (2, 2))


@pytest.mark.parametrize("batch", [1, 2])
def test_new_tokens_see_earlier_tokens_and_no_later_ones(kind, batch):
    # 2 queries over 5 keys: with a causal flag, the first query would see only one key
    cache = filled(kind, 3, batch)
    cache.advance(2)
    content = torch.tensor([1000.0, 2000.0])[None, None, :, None].expand(batch, 2, 2, 8)
    cache.append(0, content, content)
    out = cache.attend(0, torch.zeros(batch, 4, 2, 8))[0, 0, :, 0]
    assert out.tolist() == pytest.approx([(0 + 1 + 2 + 1000) / 4, (0 + 1 + 2 + 1000 + 2000) / 5])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 3), (28, 4), (5, 1), (3, 3)])
@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("cached", [0, 3])
def test_adjacent_query_heads_share_a_kv_head(kind, heads, kv_heads, tokens, cached):
    shape = KVShape.uniform(1, kv_heads, 4)
    for counts in (None, [tokens, 1]):
        cache = make_cache(kind, shape, 2, 64)
        for new, real in ((cached, None), (tokens, counts)):
            if new:
                cache.advance(new, real)
                values = (
                    torch.arange(kv_heads).float()[None, :, None, None].expand(2, kv_heads, new, 4)
                )
                cache.append(0, torch.randn(2, kv_heads, new, 4), values)
        out = cache.attend(0, torch.randn(2, heads, tokens, 4))[0, :, -1, 0]
        group = heads // kv_heads
        assert out.round().int().tolist() == [
            head for head in range(kv_heads) for _ in range(group)
        ]


def test_length_includes_tokens_outside_the_window(kind):
    shape = KVShape((LayerKV(2, 8, window=4), LayerKV(2, 8)))
    cache = filled(kind, 10, shape=shape)
    assert (cache.length, cache.lengths) == (10, (10,))
    windowed, everything = mean_seen(cache)[:, 0].tolist()
    assert cache.length == 11
    assert everything == pytest.approx((sum(range(10)) + 1000) / 11)
    assert windowed == pytest.approx((7 + 8 + 9 + 1000) / 4)


@pytest.mark.parametrize(("window", "sinks"), [(3, 0), (3, 2), (1, 0), (8, 1), (64, 0)])
@pytest.mark.parametrize("chunks", [[20], [7, 5, 8], [1] * 20, [19, 1], [8, 1, 11]])
def test_a_window_is_the_same_band_for_all_chunk_sizes(kind, window, sinks, chunks):
    generator = torch.Generator().manual_seed(0)
    shape = KVShape((LayerKV(2, 8, window=window, sinks=sinks),))
    q, k, v = (torch.randn(1, heads, 20, 8, generator=generator) for heads in (4, 2, 2))
    expected = attention(q, k, v, torch.arange(20), torch.arange(20), window, sinks)
    cache, outs, at = make_cache(kind, shape, 1, 64), [], 0
    for size in chunks:
        cache.advance(size)
        part = slice(at, at + size)
        cache.append(0, k[:, :, part], v[:, :, part])
        outs.append(cache.attend(0, q[:, :, part]))
        at += size
    torch.testing.assert_close(torch.cat(outs, 2), expected, atol=2e-5, rtol=2e-5)


def test_a_given_scale_is_used(kind):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 6, 8, generator=generator) for heads in (4, 2, 2))
    for scale in (0.1, 1.0):
        cache = make_cache(kind, KVShape.uniform(1, 2, 8), 1, 64)
        cache.advance(6)
        cache.append(0, k, v)
        expected = attention(q * scale * q.shape[3] ** 0.5, k, v, torch.arange(6), torch.arange(6))
        torch.testing.assert_close(cache.attend(0, q, scale), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("selected", [False, True])
def test_a_cache_filled_in_inference_mode_works_outside_it(kind, selected):
    with torch.inference_mode():
        cache = filled(kind, 3, batch=2)
        if selected:
            cache.select([1, 0])
            cache.select([1, 0])
    assert_unchanged(cache, (3, 3))


@pytest.mark.parametrize(
    ("argument", "value"), [("batch", 0), ("batch", 1.5), ("capacity", 0), ("capacity", -3)]
)
def test_invalid_sizes_raise(kind, argument, value):
    with pytest.raises(BadRequest):
        make_cache(kind, SHAPE, **{argument: value})
