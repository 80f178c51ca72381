"""The windowed cache: the tokens it stores, its output, and how far it can rewind."""

import pytest
import torch

from labkit.cache import WindowedCache, windowed_cache
from labkit.errors import BadRequest
from labkit.generate import generate
from labkit.model.tiny import tiny_model
from labkit.plan.kv import KVShape, LayerKV, kv_bytes


def positions(cache, layer=0, row=0):
    slots = cache.cached_keys(layer)[1][row].tolist()
    return sorted(p for p in slots if p < 2**62)


def numbered(cache, count):
    """Append tokens one by one; key and value of token s are s everywhere."""
    for s in range(cache.length, cache.length + count):
        cache.advance(1)
        for layer, spec in enumerate(cache.shape.layers):
            token = torch.full((1, spec.num_kv_heads, 1, spec.head_dim), float(s))
            cache.append(layer, token, token)


def test_the_ninth_token_replaces_the_first_in_a_window_of_eight():
    cache = WindowedCache(KVShape.uniform(1, 2, 4, window=8))
    numbered(cache, 8)
    assert positions(cache) == list(range(8))
    numbered(cache, 1)
    assert positions(cache) == list(range(1, 9)) == sorted(cache.keys[0][0, 0, :, 0].tolist())
    assert cache.keys[0].shape[2] == 8  # a window of 8 is not 9


def test_sinks_stay_next_to_the_window():
    cache = WindowedCache(KVShape.uniform(1, 2, 4), window=6, sinks=2)
    numbered(cache, 20)
    assert positions(cache) == [0, 1, *range(14, 20)]
    assert sorted(cache.keys[0][0, 0, :, 0].tolist()) == positions(cache)


def test_a_layer_without_window_stores_all_tokens():
    cache = WindowedCache(KVShape((LayerKV(2, 4, window=4), LayerKV(2, 4))))
    numbered(cache, 10)
    assert (
        cache.length == 10
        and positions(cache, 0) == [6, 7, 8, 9]
        and positions(cache, 1) == list(range(10))
    )
    assert cache.nbytes_used() == kv_bytes(cache.shape, 10, 1, "fp32")


@pytest.mark.parametrize("capacity", [3, 8, 40, None])
def test_bytes_equal_the_formula(capacity):
    shape = KVShape(
        (
            LayerKV(2, 4, window=4),
            LayerKV(1, 8, window=6, sinks=2),
            LayerKV(2, 4),
            LayerKV(2, 4, shared_with=0),
        )
    )
    cache = WindowedCache(shape, 2, capacity, torch.bfloat16)
    if capacity:
        assert cache.nbytes() == kv_bytes(shape, capacity, 2, "bf16")
    for tokens in (1, 2, 3):
        cache.advance(1)
        assert cache.nbytes_used() == kv_bytes(shape, tokens, 2, "bf16")
    imposed = WindowedCache(KVShape.uniform(2, 2, 4), 1, 1000, torch.bfloat16, window=16, sinks=4)
    assert imposed.nbytes() == kv_bytes(imposed.shape, 1000, 1, "bf16") == 20 * 2 * 2 * 2 * 4 * 2


@pytest.mark.parametrize("chunk", [None, 1, 7])
@pytest.mark.parametrize("window", [40, 64])
def test_a_window_that_is_never_full_is_exact(chunk, window):
    model = tiny_model()
    prompts = [list(range(3, 30)), [5, 6, 7]]
    expected = generate(model, prompts, max_new_tokens=13, end_ids=())
    got = generate(
        model,
        prompts,
        max_new_tokens=13,
        end_ids=(),
        cache=windowed_cache(window),
        prefill_chunk=chunk,
    )
    assert [c.tokens for c in got] == [c.tokens for c in expected]


@pytest.mark.parametrize("chunk", [None, 1, 3, 8])
def test_an_imposed_window_equals_a_model_with_windows(chunk):
    """The oracle is one pass of a model with windows, with a band mask."""
    model, banded = tiny_model(), tiny_model("mistral", windows=(4, 4))
    for prompts in ([list(range(3, 30))], [list(range(3, 30)), [5, 6], list(range(40, 53))]):
        expected = generate(banded, prompts, max_new_tokens=9, end_ids=(), cache="none")
        got = generate(
            model,
            prompts,
            max_new_tokens=9,
            end_ids=(),
            cache=windowed_cache(4),
            prefill_chunk=chunk,
        )
        assert [c.tokens for c in got] == [c.tokens for c in expected]


def test_tokens_of_one_chunk_see_those_of_the_chunk_before():
    """With window 4 and chunks of 4, tokens 4, 5 and 6 see token 3 of the first chunk."""
    cache = WindowedCache(KVShape.uniform(1, 1, 4, window=4))
    for start in (0, 4):
        cache.advance(4)
        values = torch.arange(start, start + 4).float()[None, None, :, None].expand(1, 1, 4, 4)
        cache.append(0, torch.zeros(1, 1, 4, 4), (values == 3).float())
    assert cache.attend(0, torch.zeros(1, 1, 4, 4))[0, 0, :, 0].tolist() == [0.25, 0.25, 0.25, 0]


@pytest.mark.parametrize(
    ("slack", "back", "works"), [(0, 1, True), (0, 2, False), (3, 4, True), (3, 5, False)]
)
def test_rewind_goes_back_slack_plus_one_tokens_and_no_further(slack, back, works):
    cache = WindowedCache(KVShape.uniform(1, 2, 4), window=6, sinks=1)
    cache.allow_rewind(slack)
    numbered(cache, 20)
    if works:
        cache.rewind(20 - back)
        with pytest.raises(BadRequest, match="cannot go back"):
            cache.rewind(20 - back - 1)  # overwritten tokens are still missing
        numbered(cache, 1)
        seen = cache.attend(0, torch.zeros(1, 2, 1, 4))[0, 0, 0, 0]
        assert seen == pytest.approx(sum([0, *range(20 - back - 5, 20 - back + 1)]) / 7)
    else:
        with pytest.raises(BadRequest, match=r"has dropped too many; give 0, or at least"):
            cache.rewind(20 - back)
        assert cache.length == 20
    cache.rewind(1)  # only the sink
    cache.rewind(0)
    numbered(cache, 9)
    assert set(positions(cache)) >= {0, *range(3, 9)}


@pytest.mark.parametrize("new", [1, 3])
def test_allow_rewind_works_on_an_empty_cache_only(new):
    cache = WindowedCache(KVShape.uniform(1, 2, 4), window=6, sinks=1)
    cache.allow_rewind(4)
    numbered(cache, 20)
    cache.advance(new)
    cache.rewind(20 + new - 5)
    assert cache.most_at_once() == (6,)
    cache.allow_rewind(50)  # too late: the other tokens have been dropped
    assert cache.slack == 4


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": 2},
        {"window": 4, "sinks": -1},
        {"window": 0},
    ],
)
def test_invalid_options_raise(options):
    with pytest.raises(BadRequest):
        WindowedCache(KVShape.uniform(1, 2, 8), **options)
