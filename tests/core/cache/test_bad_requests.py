"""Every cache of the registry raises BadRequest for invalid arguments and does not change."""

import pytest
import torch

from labkit.cache import CACHES, eviction, make_cache, quantized_cache, windowed_cache
from labkit.errors import BadRequest
from labkit.model.tiny import tiny_model
from labkit.plan.kv import KVShape, LayerKV, kv_bytes
from labkit.plan.kv_formats import KVFormat, Part

SHAPE = KVShape.uniform(2, 2, 8)
TOKEN = Part(4, "token", None, 16, 16)
every_cache = pytest.mark.parametrize(
    "kind", [name for name, maker in CACHES.items() if maker is not None]
)


def fed(cache, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    cache.advance(tokens)
    for layer in range(cache.shape.num_layers):
        keys, values = (
            torch.randn(cache.batch, 2, tokens, 8, generator=generator).to(cache.dtype)
            for _ in "kv"
        )
        cache.append(layer, keys, values)
        out = cache.attend(
            layer, torch.randn(cache.batch, 4, tokens, 8, generator=generator).to(cache.dtype)
        )
    return out


SIZES = [
    {"batch": 0},
    {"batch": -1},
    {"batch": True},
    {"batch": "2"},
    {"batch": 1.0},
    {"capacity": 0},
    {"capacity": "3"},
    {"capacity": 2.5},
    {"dtype": torch.int8},
    {"dtype": "fp16"},
    {"dtype": None},
    {"dtype": torch.float8_e4m3fn},
    {"dtype": torch.complex64},
    {"device": "nonsense"},
    {"device": None},
    {"shape": None},
    {"shape": KVShape(())},
]


@every_cache
@pytest.mark.parametrize("given", SIZES, ids=str)
def test_invalid_sizes_dtypes_and_devices_raise(kind, given):
    with pytest.raises(BadRequest):
        make_cache(kind, **({"shape": SHAPE} | given))


CALLS = {
    "select": [
        (None,),
        (1,),
        ("0",),
        ([None],),
        ([3],),
        ([-1],),
        ((),),
        ([0.0],),
        ([True],),
        (torch.tensor(0),),
    ],
    "rewind": [
        (None,),
        ("2",),
        ([None] * 3,),
        ([1, 2],),
        (-1,),
        (99,),
        ((),),
        ([1.5] * 3,),
        (True,),
        (torch.tensor(9),),
    ],
    "advance": [
        (0,),
        (-1,),
        ("3",),
        (None,),
        (2.0,),
        (True,),
        (2, 3),
        (2, [1, 2]),
        (2, "112"),
        (2, [3, 0, 0]),
        (2, [0, 0, 0]),
        (2, [2, -1, 0]),
        (2, [1.0, 0, 1]),
        (2, torch.tensor(1)),
    ],
}


@every_cache
@pytest.mark.parametrize("call", CALLS)
def test_invalid_calls_raise_and_change_nothing(kind, call):
    cache, twin = (make_cache(kind, SHAPE, 3, 64) for _ in range(2))
    fed(cache, 5), fed(twin, 5)
    for arguments in CALLS[call]:
        with pytest.raises(BadRequest):
            getattr(cache, call)(*arguments)
        assert cache.lengths == (5, 5, 5)
    assert torch.equal(fed(cache, 3, seed=1), fed(twin, 3, seed=1))


@every_cache
def test_lengths_rows_and_counts_may_be_tensors(kind):
    cache = make_cache(kind, SHAPE, 3, 64)
    fed(cache, 5)
    cache.rewind(torch.tensor([5, 4, 3]))
    cache.select(torch.tensor([2, 0]))
    cache.advance(2, torch.tensor([1, 2]))
    assert cache.lengths == (4, 7)


@every_cache
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_capacity_of_one_works_in_every_dtype(kind, dtype):
    cache = make_cache(kind, SHAPE, 2, 1, dtype)
    out = fed(cache, 1)
    assert out.dtype == dtype and out.isfinite().all()
    with pytest.raises(BadRequest, match="full"):
        cache.advance(1)
    cache.rewind([0, 1])
    assert cache.advance(1, [1, 0])[0].tolist() == [0] and cache.lengths == (1, 1)


THREE = torch.ones(3)
WINDOWS = [
    {"window": 0},
    {"window": -1},
    {"window": 1.5},
    {"window": "4"},
    {"window": True},
    {"window": 2, "sinks": -1},
    {"window": 2, "sinks": 1.5},
    {"window": 2, "sinks": "1"},
    {"sinks": 2},
]


@pytest.mark.parametrize("given", WINDOWS, ids=str)
def test_invalid_windows_raise_when_the_cache_is_made(given):
    with pytest.raises(BadRequest):
        windowed_cache(**given)(SHAPE)


BUDGETS = [{"budget": b} for b in (0, -1, 0.5, 2.0, "4", True, None, float("nan"))]
OTHERS = [{"sinks": -1}, {"sinks": 1.5}, {"sinks": "1"}, {"recent": -1}, {"recent": 1.5}]


@pytest.mark.parametrize("given", BUDGETS + OTHERS, ids=str)
def test_invalid_budgets_raise_when_the_cache_is_made(given):
    with pytest.raises(BadRequest, match=next(iter(given)).replace("recent", "recent tokens")):
        eviction.KeyNorm(SHAPE, **given)


PARTS = [
    (0, "token", None, 16, 16),
    (9, "token", None, 16, 16),
    (2.5, "token", None, 16, 16),
    ("4", "token", None, 16, 16),
    (1, "token", None, 16, 0),
    (4, "token", 0, 16, 16),
    (4, "token", -4, 16, 16),
    (4, "channel", None, 16, 16),
    (4, "channel", 0, 16, 16),
    (4, "channel", 2.5, 16, 16),
    (4, "tensor", None, 16, 16),
    (4, "foo", 8, 16, 16),
    (4, None, 8, 16, 16),
    (4, "token", None, 0, 0),
    (4, "token", None, 12, 16),
    (4, "token", None, 8, 0),
    (4, "token", None, 16, 8),
    (4, "token", None, 16, 16, "foo"),
    (4, "channel", 4, 8, 0, "nvfp4"),
    (4, "token", None, 16, 0, "fp8"),
    (8, "token", None, 16, 16, "fp8"),
    (8, "token", 16, 8, 0, "nvfp4"),
    (4, "token", 16, 16, 0, "nvfp4"),
]


@pytest.mark.parametrize("given", PARTS, ids=str)
def test_invalid_parts_raise(given):
    with pytest.raises(BadRequest):
        Part(*given)


def by_channel(group):
    return Part(4, "channel", group, 16, 16)


FORMATS = {
    "keys alone": (TOKEN, Part(16)),
    "values alone": (Part(16), TOKEN),
    "blocks of 3 and 4": (by_channel(3), by_channel(4), 64),
    "a short tail": (by_channel(32), TOKEN, 3),
    "half a token": (TOKEN, TOKEN, 1.5),
    "less than none": (TOKEN, TOKEN, -1),
    "text": (TOKEN, TOKEN, "64"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_invalid_formats_raise(name):
    with pytest.raises(BadRequest):
        KVFormat("x", *FORMATS[name])


@pytest.mark.parametrize("name", ["nonsense", None, 3, "", "int4_nonsense", "bf16_prerope"])
def test_unknown_format_names_raise_with_the_list_of_names(name):
    with pytest.raises(BadRequest, match="int4_kivi"):
        quantized_cache(name)


@pytest.mark.parametrize("frequencies", [None, THREE, 4])
def test_frequencies_of_another_size_raise(frequencies):
    with pytest.raises(BadRequest, match="frequencies"):
        quantized_cache("int4_prerope", frequencies)(SHAPE)


LAYERS = [
    {"window": 0},
    {"window": 1.5},
    {"window": "3"},
    {"window": 2, "sinks": -1},
    {"num_kv_heads": 0},
    {"num_kv_heads": 1.5},
    {"head_dim": -3},
    {"head_dim": 0},
]


@pytest.mark.parametrize("given", LAYERS, ids=str)
def test_invalid_layers_raise(given):
    with pytest.raises(BadRequest):
        LayerKV(**({"num_kv_heads": 2, "head_dim": 8} | given))


@pytest.mark.parametrize(
    "given",
    [(-1,), (2.5,), ("3",), (None,), (3, -1), (3, 1.5), (3, 1, "nonsense"), (3, 1, "int4", 0)],
)
def test_invalid_arguments_of_kv_bytes_raise(given):
    with pytest.raises(BadRequest):
        kv_bytes(SHAPE, *given)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("counts", [[1], [5, 1], [0, 0], [-1, 2], [1.0, 2], 2, "12"])
def test_the_decoder_checks_counts_with_and_without_a_cache(cached, counts):
    model = tiny_model()
    cache = model.new_cache(2, 16) if cached else None
    with pytest.raises(BadRequest, match="counts"):
        model(torch.ones(2, 4, dtype=torch.long), cache, counts)


@every_cache
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_batch_of_another_size_than_the_cache_raises(kind, rows):
    model = tiny_model()
    cache = model.new_cache(3, 16, kind)
    with pytest.raises(BadRequest, match=f"The cache has 3 rows and the tokens {rows}"):
        model(torch.ones(rows, 4, dtype=torch.long), cache)
    assert cache.lengths == (0, 0, 0)
