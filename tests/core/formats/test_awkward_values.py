"""Zero, tiny, constant, all-negative, outlier and NaN blocks; shapes that do not divide; the bound of every format."""

import pytest
import torch

from fakes import FORMATS
from labkit.errors import BadRequest
from labkit.formats import dequantize, floats, get_format, round_to_nearest
from labkit.formats.integer import Grid, encode, round_to_grid

INTEGERS = [name for name in FORMATS if name.startswith("int")] + [
    "int4_channel_zp",
    "int4_channel_min",
    "int4_g32_mid",
]
SCALED = INTEGERS + ["fp8_e4m3", "nvfp4"]


def allowed(weight, quantized):
    """What a format may lose, weight by weight: half a stored scale (integers), by the docstrings (floats)."""
    if quantized.format.name == "fp8_e4m3":
        return weight.abs() / 16 + quantized.scale * 2**-10
    if quantized.format.name == "nvfp4":
        blocks = (
            quantized.scale.float().repeat_interleave(16, 1)[:, : weight.shape[1]]
            * quantized.tensor_scale
        )
        return weight.abs() / 4 + blocks / 4
    size = quantized.format.group_size or weight.numel()
    scale = quantized.scale.float()
    columns = (
        scale.repeat_interleave(size, 1)[:, : weight.shape[1]]
        if quantized.format.group_size
        else scale
    )
    bound = columns * 0.5
    if quantized.format.offset in ("minimum", "middle"):  # the offset itself is rounded
        bound = bound + 2.0 ** (-8 if quantized.format.scale_dtype == "bf16" else -11) * (
            weight.abs() + 16 * columns
        )
    if quantized.format.scale_dtype in ("fp16", "bf16"):  # a rounded-down scale clips the ends
        bound = bound + columns * 2.0 ** (
            quantized.format.bits - (8 if quantized.format.scale_dtype == "bf16" else 11)
        )
    return bound + weight.abs() * 1e-6 + 1e-7 * columns


@pytest.mark.parametrize("name", SCALED)
def test_every_value_is_within_the_stated_bound(name):
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(3))
    quantized = round_to_nearest(weight, name)
    assert bool(((quantized.dequantize() - weight).abs() <= allowed(weight, quantized)).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SCALED)
def test_awkward_rows(name, dtype):
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    weight[0] = 0.0
    weight[1] = 1e-6 * torch.sign(weight[1])
    weight[2] = 5.0
    weight[3] = -weight[3].abs() - 0.01
    weight[4, 7] = 1e4
    weight = weight.to(dtype)
    quantized = round_to_nearest(weight, name)
    back, weight = quantized.dequantize(), weight.float()
    assert bool(torch.isfinite(back).all()) and bool(torch.isfinite(quantized.scale.float()).all())
    assert torch.equal(back[0], torch.zeros(64))  # zero is exact
    if get_format(name).sharing != "tensor":
        assert bool(
            (quantized.scale.float()[3] > 0).all()
        )  # the absolute maximum, taken with its absolute value
        torch.testing.assert_close(
            back[2], weight[2], rtol=2**-4 if name == "nvfp4" else 2**-8, atol=0
        )  # a constant
        assert bool((back[3] <= 0).all())
        if name != "nvfp4":  # there the outlier of another row sets the tensor's scale
            assert bool(back[1].abs().max() > 0)  # tiny is not lost to a scale that underflowed
    assert bool(((back - weight).abs() <= allowed(weight, quantized)).all())


def test_a_float16_scale_never_underflows():
    weight = torch.full((1, 64), 1e-7)
    weight[0, ::2] *= -1
    for name in ("int4_g64_sym", "int4_g64_zp", "int4_g64_min", "int8_g64_sym"):
        quantized = round_to_nearest(weight, name)
        assert float(quantized.scale.min()) >= 2**-24
        assert bool(((quantized.dequantize() - weight).abs() <= 2**-24).all())


def test_codes_saturate_and_do_not_wrap():
    grid = Grid(get_format("int8_channel"), torch.ones(1, 1), None)
    assert encode(torch.tensor([[[200.0, -200.0, 3.0]]]), grid).flatten().tolist() == [127, -128, 3]
    assert torch.tensor(200).to(torch.int8).item() == -56  # what a raw cast would have given
    codes, values = round_to_grid(torch.tensor([[300.0]]), grid)
    assert (codes.item(), values.item()) == (127, 127.0)


@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_infinity_are_refused(name):
    for bad in (float("nan"), float("inf"), -float("inf")):
        weight = torch.ones(2, 64)
        weight[1, 5] = bad
        with pytest.raises(BadRequest, match="NaN or infinity"):
            round_to_nearest(weight, name)


def test_what_does_not_fit_is_refused_not_saturated():
    with pytest.raises(BadRequest, match="does not fit fp16"):
        round_to_nearest(torch.tensor([[1e5]]), "fp16")
    with pytest.raises(BadRequest, match="does not fit int4_g2_sym"):
        round_to_nearest(torch.tensor([[1e6, 1.0]]), "int4_g2_sym")
    with pytest.raises(BadRequest, match="no row"):
        round_to_nearest(torch.zeros(0, 4), "int8_channel")
    with pytest.raises(BadRequest, match="floating-point"):
        round_to_nearest(torch.zeros(2, 4, dtype=torch.int64), "int8_channel")


def test_e4m3_is_checked_before_the_cast():
    for bad in (465.0, 1000.0, float("inf"), float("nan")):
        with pytest.raises(BadRequest, match="448"):
            floats.to_e4m3(torch.tensor([1.0, bad]))
    assert float(floats.to_e4m3(torch.tensor(448.0)).float()) == 448


def test_nvfp4_blocks_of_zero_tiny_and_large():
    weight = torch.zeros(1, 48)
    weight[0, 16:32], weight[0, 32:] = 1e-6, 3.0
    scales, tensor_scale = floats.nvfp4_scales(weight.view(1, 3, 16))
    assert (
        float(scales.max()) <= 448.0
    )  # before the cast; a stand-in of 1 for the zero block would be 896
    quantized = round_to_nearest(weight, "nvfp4")
    assert not bool(torch.isnan(quantized.scale.float()).any())
    back = quantized.dequantize()
    assert torch.equal(back[0, :16], torch.zeros(16))
    assert (
        bool(((back[0, 16:32] - 1e-6).abs() <= float(tensor_scale) * 2**-9 / 4).all())
        and float(back[0, 16:32].abs().max()) > 0
    )
    torch.testing.assert_close(back[0, 32:], weight[0, 32:])


def test_a_short_last_group_is_its_own_and_reads_nothing_past_the_end():
    base = torch.full((2, 200), float("nan"))
    base[:, :80] = torch.randn(2, 80, generator=torch.Generator().manual_seed(0))
    view = base[:, :80]  # poison behind every row
    for name in ("int4_g128_zp", "int4_g32_min", "int3_g64_zp", "nvfp4", "int8_g32_sym"):
        quantized = round_to_nearest(view, name)
        assert quantized.dequantize().shape == (2, 80) and bool(
            torch.isfinite(quantized.dequantize()).all()
        )
        tail = 80 - 80 % (get_format(name).group_size)
        if (
            tail < 80 and name != "nvfp4"
        ):  # the tail alone gives the same codes: no neighbour in its range
            alone = round_to_nearest(view[:, tail:].contiguous(), name)
            assert torch.equal(alone.dequantize(), quantized.dequantize()[:, tail:])
    assert round_to_nearest(torch.ones(1, 4304), "int4_g32_sym").scale.shape == (1, 135)


def test_a_float_minimum_gives_a_q4_1_grid_back():
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 16, (4, 64), generator=generator).float()
    codes[:, ::32], codes[:, 1::32] = 0, 15
    scale = torch.rand(4, 2, generator=generator).half().float().repeat_interleave(32, 1)
    minimum = (-7.3 * scale).half().float()
    weight = codes * scale + minimum
    torch.testing.assert_close(
        dequantize(round_to_nearest(weight, "int4_g32_min")), weight, rtol=1e-6, atol=1e-6
    )
    assert float((dequantize(round_to_nearest(weight, "int4_g32_zp")) - weight).abs().max()) > 1e-4


@pytest.mark.parametrize("name", FORMATS)
def test_rows_looked_up_are_rows_dequantised(name):
    quantized = round_to_nearest(
        torch.randn(9, 40, generator=torch.Generator().manual_seed(2)), name
    )
    index = torch.tensor([[0, 8], [3, 3]])
    assert torch.equal(quantized.rows(index), quantized.dequantize()[index])
    one = round_to_nearest(torch.ones(1, 40), name)
    assert one.rows(torch.tensor([0, 0])).shape == (2, 40)
