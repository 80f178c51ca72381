"""GPTQ against brute force, against rounding, and on the Hessians that break factorisations."""

import itertools
import warnings

import pytest
import torch

from labkit.errors import BadRequest
from labkit.formats import get_format, integer, round_to_nearest
from labkit.quant.calibrate import InputStatistics
from labkit.quant.gptq import gptq
from labkit.quant.rtn import error, rtn

FORMATS = [
    "int4_g64_zp",
    "int4_g32_min",
    "int4_channel",
    "int3_g64_zp",
    "int4_g32_sym",
    "int2_g32_zp",
    "int4_tensor",
    "int8_channel",
]


def problem(rows=24, columns=128, tokens=400, seed=0):
    """Weights, and inputs that are correlated and have one dominant token and a few large columns."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator)
    x = torch.randn(tokens, columns, generator=generator) @ mix * 0.1
    x[:, 5] *= 8
    statistics = InputStatistics.empty(columns)
    statistics.add(x)
    return torch.randn(rows, columns, generator=generator), statistics.hessian


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("act_order", [True, False])
def test_it_beats_rounding_on_what_the_layer_reads(name, act_order):
    weight, H = problem()
    quantized = gptq(weight, get_format(name), H, act_order=act_order)
    assert error(weight, quantized, H) < 0.9 * error(weight, round_to_nearest(weight, name), H)
    assert quantized.nbytes == get_format(name).nbytes((24, 128))


def test_static_groups_keep_the_grid_and_the_order_of_columns():
    weight, H = problem()
    quantized = gptq(weight, get_format("int4_g64_zp"), H)
    rounded = round_to_nearest(weight, "int4_g64_zp")
    assert torch.equal(quantized.scale, rounded.scale) and torch.equal(
        quantized.offset, rounded.offset
    )
    assert float((quantized.dequantize() - weight).abs().max()) < 40 * float(
        quantized.scale.float().max()
    )  # no column in another's place


def test_a_diagonal_hessian_is_rounding_to_nearest():
    weight, _ = problem()
    quantized = gptq(weight, get_format("int4_g64_zp"), torch.diag(torch.rand(128) + 0.5))
    assert torch.equal(quantized.codes, round_to_nearest(weight, "int4_g64_zp").codes)


def test_two_columns_against_all_code_pairs():
    """With two inputs and the second rounded last, GPTQ is the best second code for the first column's rounding."""
    H = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
    weight = torch.tensor([[0.26, 1.0], [0.74, -1.0], [0.49, 0.9]])
    quantized = gptq(weight, get_format("int4_channel"), H, damping=0.0)
    grid = integer.fit(weight, get_format("int4_channel"))
    for row in range(3):
        scale = float(grid.scale[row])
        first = round(float(weight[row, 0]) / scale)

        def cost(codes, row=row, scale=scale):
            d = torch.tensor([codes[0] * scale, codes[1] * scale]) - weight[row]
            return float(d @ H @ d)

        best = min(itertools.product([first], range(-8, 8)), key=cost)
        assert tuple(quantized.codes[row].tolist()) == best


def test_no_calibration_reached_it_is_rounding_said_aloud():
    weight, _ = problem()
    with pytest.warns(
        UserWarning, match="experts.3 is rounded to nearest, because no calibration token"
    ):
        quantized = gptq(weight, get_format("int4_g64_zp"), torch.zeros(128, 128), name="experts.3")
    assert torch.equal(quantized.codes, round_to_nearest(weight, "int4_g64_zp").codes)


def test_dead_columns_stay_finite_and_rounded():
    weight, H = problem()
    H[7, :], H[:, 7] = 0.0, 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized = gptq(weight, get_format("int8_channel"), H)
    back = quantized.dequantize()
    assert bool(torch.isfinite(back).all())
    assert (
        float((back[:, 7] - weight[:, 7]).abs().max())
        <= float(quantized.scale.float().max()) * 0.51
    )


def test_fewer_tokens_than_columns_succeed():
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(1))
    statistics = InputStatistics.empty(512)
    statistics.add(x)
    weight = torch.randn(16, 512, generator=torch.Generator().manual_seed(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized = gptq(weight, get_format("int4_g64_zp"), statistics.hessian)
    assert error(weight, quantized, statistics.hessian) < 0.5 * error(
        weight, round_to_nearest(weight, "int4_g64_zp"), statistics.hessian
    )


def test_float32_needs_little_damping_where_bfloat16_needs_much():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 256, generator=generator) @ torch.randn(256, 256, generator=generator)
    H = x.T @ x / len(x)

    def factor(h, share):
        return torch.linalg.cholesky_ex(h + share * h.diagonal().mean() * torch.eye(256))[1].item()

    assert factor(H, 0.0001) == 0
    assert (
        factor(H.bfloat16().float(), 0.0001) != 0
    )  # rounding destroyed what damping cannot cheaply repair


def test_sums_do_not_overflow():
    statistics = InputStatistics.empty(4)
    for _ in range(3):
        statistics.add(torch.full((1000, 4), 300.0, dtype=torch.float16))
    assert bool(torch.isfinite(statistics.hessian).all())
    torch.testing.assert_close(statistics.hessian[0, 0], torch.tensor(90000.0))


def test_bad_requests():
    weight, H = problem()
    with pytest.raises(BadRequest, match="use method 'rtn'"):
        gptq(weight, get_format("fp8_e4m3"), H)
    with pytest.raises(BadRequest, match="128 inputs but a Hessian"):
        gptq(weight, get_format("int4_channel"), H[:5, :5])
    weight[0, 0] = float("nan")
    with pytest.raises(BadRequest, match="NaN"):
        gptq(weight, get_format("int4_channel"), H)


def test_an_indefinite_hessian_falls_back_aloud():
    weight, H = problem()
    with pytest.warns(UserWarning, match="its Hessian has no factor"):
        gptq(weight, get_format("int4_channel"), H - 50 * H.diagonal().max() * torch.eye(128))


@pytest.mark.parametrize("bits, group", [(2, 32), (3, 64), (4, 32), (4, 128), (8, 64)])
def test_rtn_in_its_plain_form_is_what_the_format_does(bits, group):
    weight, _ = problem()
    weight[:2] = 0.0
    weight[2:4] = weight[2:4].abs()
    assert torch.equal(
        rtn(weight, bits, group), round_to_nearest(weight, f"int{bits}_g{group}_zp").dequantize()
    )
