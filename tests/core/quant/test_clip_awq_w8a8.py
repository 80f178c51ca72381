"""Clipping, AWQ's folds, and W8A8, each against its plain definition."""

import pytest
import torch
from torch import nn

from labkit.errors import BadRequest
from labkit.formats import get_format, integer, round_to_nearest
from labkit.formats.tensor import from_grid
from labkit.quant.awq import Fold, awq, search_scale
from labkit.quant.calibrate import InputStatistics
from labkit.quant.clip import diagonal_blocks, search_clip, weighted
from labkit.quant.linear import QuantizedLinear
from labkit.quant.methods import Method, quantize, round_trip
from labkit.quant.rtn import error
from labkit.quant.w8a8 import W8A8Weight, quantize_tokens, reference


def outliers(rows=32, columns=96, seed=0):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight[:, ::31] *= 4
    return weight


@pytest.mark.parametrize(
    "name",
    ["int4_g32_zp", "int4_g64_zp", "int3_g64_zp", "int4_channel", "int4_g32_min", "int2_g32_zp"],
)
def test_clipping_never_loses_to_the_full_range(name):
    weight, format = outliers(), get_format(name)
    full, clipped = (
        round_to_nearest(weight, name),
        from_grid(weight, search_clip(weight, format), (32, 96)),
    )
    per_row = lambda quantized: (quantized.dequantize() - weight).square().sum(1)  # noqa: E731
    assert bool((per_row(clipped) <= per_row(full) * 1.0001).all())
    assert float(per_row(clipped).sum()) < 0.98 * float(per_row(full).sum())


def test_clipping_weighs_by_what_is_read():
    weight, format = outliers(), get_format("int3_g64_zp")
    H = torch.diag(
        torch.where(torch.arange(96) % 31 == 0, 100.0, 0.01)
    )  # only the outliers matter: do not clip them
    grid = search_clip(weight, format, H)
    assert (
        error(weight, from_grid(weight, grid, (32, 96)), H)
        <= error(weight, round_to_nearest(weight, "int3_g64_zp"), H) * 1.0001
    )
    free = search_clip(weight, format)
    assert float(grid.scale.float().mean()) > float(free.scale.float().mean())


def test_blocks_of_a_hessian_with_a_short_last_group():
    H = torch.randn(80, 80, generator=torch.Generator().manual_seed(0))
    H = H @ H.T
    blocks = diagonal_blocks(H, 3, 32)
    assert torch.equal(blocks[1], H[32:64, 32:64]) and torch.equal(blocks[2][:16, :16], H[64:, 64:])
    assert float(blocks[2][16:].abs().max()) == 0
    d = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(weighted(d, blocks)[1, 0], d[1, 0] @ H[:32, :32] @ d[1, 0])


class Small(nn.Module):
    """norm -> one -> (rows 8..16 of it) -> two, with 2 query heads a KV head of 4."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(64)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self.one = nn.Linear(64, 16)
        self.two = nn.Linear(16, 8)

    def inputs_of_two(self, x):
        v = self.one(self.norm(x))[..., 8:16].unflatten(-1, (2, 4))  # [., KV heads, D]
        return v.repeat_interleave(2, -2).flatten(-2)

    def forward(self, x):
        return self.two(self.inputs_of_two(x))


FOLDS = [Fold("norm", ("one",)), Fold("one", ("two",), (8, 16), repeat=2, head_dim=4)]


def test_folding_does_not_change_the_model():
    model = Small()
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(3)) * torch.logspace(-1, 1, 64)
    before = model(x)
    for fold, size in zip(FOLDS, (64, 8)):
        fold.apply(model, torch.rand(size) + 0.5)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    with pytest.raises(BadRequest, match="correct its Fold"):
        FOLDS[1].apply(model, torch.ones(16))


def test_shared_and_spread_follow_the_query_heads():
    fold = FOLDS[1]
    assert fold.spread(torch.arange(8.0)).tolist() == [
        0,
        1,
        2,
        3,
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        4,
        5,
        6,
        7,
    ]
    assert torch.equal(fold.shared(fold.spread(torch.arange(8.0))), torch.arange(8.0))


def test_awq_lowers_the_error_and_keeps_the_function():
    model, method, format = Small(), Method("awq"), get_format("int3_channel_zp")
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        model.norm.weight.mul_(torch.logspace(-1.5, 1.5, 64))
    statistics = {"one": InputStatistics.empty(64), "two": InputStatistics.empty(16)}
    with torch.no_grad():
        statistics["one"].add(model.norm(x))
        statistics["two"].add(model.inputs_of_two(x))
        before = model(x)
        plain = error(
            model.one.weight,
            round_to_nearest(model.one.weight, format.name),
            statistics["one"].hessian,
        )
        alphas = awq(model, FOLDS, statistics, lambda name, w, s: round_trip(w, format, method, s))
        torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-3)
        scaled = error(
            model.one.weight,
            round_to_nearest(model.one.weight, format.name),
            statistics["one"].hessian,
        )
        seen = InputStatistics.empty(64)
        seen.add(model.norm(x))
    assert alphas["one"] > 0 and scaled < 0.6 * plain
    torch.testing.assert_close(
        statistics["one"].hessian, seen.hessian, rtol=1e-3, atol=1e-4
    )  # rescaled, not re-measured


def test_awq_keeps_alpha_zero_where_nothing_helps():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    statistics = InputStatistics.empty(64)
    statistics.add(torch.ones(10, 64))
    scale, alpha = search_scale(FOLDS[0], [weight], statistics, lambda w, s: w)
    assert alpha == 0.0 and torch.equal(scale, torch.ones(64))


def test_w8a8_equals_its_reference_for_awkward_tokens():
    weight = torch.randn(48, 100, generator=torch.Generator().manual_seed(0))
    quantized = round_to_nearest(weight, "int8_channel")
    x = torch.randn(20, 100, generator=torch.Generator().manual_seed(1))
    x[0], x[1, 3], x[2] = 0.0, 1e6, 1e-20
    layer = W8A8Weight(quantized)
    torch.testing.assert_close(layer.matmul(x), reference(x, quantized), rtol=1e-5, atol=1e-30)
    assert torch.equal(layer.matmul(x)[0], torch.zeros(48))
    for row in (3, 10):  # a token's result does not depend on its neighbours
        torch.testing.assert_close(layer.matmul(x[row : row + 1])[0], layer.matmul(x)[row])
    close = (layer.matmul(x[3:]) - x[3:] @ weight.T).abs().max() / (x[3:] @ weight.T).abs().max()
    assert float(close) < 0.02


def test_token_codes_saturate_and_nan_stays_visible():
    codes, scale = quantize_tokens(torch.tensor([[127.0, -254.0, 1.0], [0.0, 0.0, 0.0]]))
    assert codes.tolist() == [[64, -127, 0], [0, 0, 0]] and float(scale[0]) == 2.0
    quantized = round_to_nearest(torch.ones(4, 3), "int8_channel")
    assert bool(
        torch.isnan(W8A8Weight(quantized).matmul(torch.tensor([[1.0, float("nan"), 2.0]]))).any()
    )
    with pytest.raises(BadRequest, match="int8_channel"):
        W8A8Weight(round_to_nearest(torch.ones(4, 3), "int4_channel"))


def test_a_linear_layer_of_any_method_is_stored_alike():
    weight, x = outliers(64, 64), torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    statistics = InputStatistics.empty(64)
    statistics.add(x)
    errors = {}
    for method in ("rtn", "clip", "gptq", "gptq+clip"):
        quantized = quantize(weight, "int4_g32_zp", statistics, method)
        assert quantized.nbytes == get_format("int4_g32_zp").nbytes((64, 64))
        errors[method] = error(weight, quantized, statistics.hessian)
        QuantizedLinear(quantized)(x)
    assert errors["gptq"] < errors["rtn"] and errors["clip"] < errors["rtn"]
    with pytest.raises(BadRequest, match="no method 'magic'"):
        Method("awq+magic")
    with pytest.raises(BadRequest, match="damping is 5; give a number from 0 to 1"):
        Method("gptq", damping=5)
    with pytest.raises(BadRequest, match="needs calibration"):
        quantize(weight, "int4_g32_zp", None, "gptq")


def test_an_integer_grid_per_column_is_the_grid_per_group():
    weight = outliers()
    for name in ("int4_g32_zp", "int4_channel", "int4_g64_min", "int4_tensor", "int3_g64_zp"):
        grid = integer.fit(weight, get_format(name))
        codes, values = integer.round_to_grid(weight, grid.columns(0, 96))
        assert torch.equal(values, round_to_nearest(weight, name).dequantize())
