"""Compare packed kernels with the plain reference, within their documented bounds."""

import warnings

import pytest
import torch

from labkit.errors import BadRequest
from labkit.formats import get_format, round_to_nearest
from labkit.formats.tensor import QuantizedTensor
from labkit.kernels import packed_torch, registry
from labkit.kernels.packed_torch import Int4Pack, Int8Pack, as_middle
from labkit.kernels.packed_weight import Plain
from labkit.kernels.registry import find_kernel, pack_weight, resident_nbytes

INT4 = [
    "int4_g32_min",
    "int4_g32_zp",
    "int4_g64_zp",
    "int4_g32_sym",
    "int4_g128_zp",
    "int4_channel",
    "int4_channel_zp",
    "int4_g32_mid",
]
needs_layout = pytest.mark.skipif(
    not packed_torch.layout_is_known(),
    reason="this build packs INT4 in an order that labkit cannot read back",
)


def weight(rows=128, columns=256, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def inputs(rows, columns=256, seed=9):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def int4_bound(held):
    """Return the largest change of each weight if scale and middle become bfloat16 [N, K]."""
    _, scale, middle = as_middle(held)
    bound, length = (8 * scale + middle.abs()) * 2.0**-8, held.shape[-1]  # [N, groups]
    return bound.repeat_interleave(held.format.group_size or length, 1)[:, :length]


def close_to_reference(layer, held, x, weight_bound=0.0):
    """Assert that |y - xW| is within the bfloat16 rounding of inputs, output and weights."""
    values = held.dequantize()
    exact = x.double() @ values.double().T
    bound = (
        x.abs().double() @ (values.abs() * 2**-8 + weight_bound).double().T
        + exact.abs() * 2**-8
        + 1e-6
    )
    return bool(((layer.matmul(x).double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("rows", [1, 2, 5, Int8Pack.few, Int8Pack.few + 1, 40])
def test_int8_equals_its_reference(rows):
    held = round_to_nearest(weight(), "int8_channel")
    layer = pack_weight(held)
    assert type(layer) is Int8Pack
    assert close_to_reference(layer, held, inputs(rows))


@pytest.mark.parametrize("length", [7, 33, 40, 72, 96, 100, 112])
def test_int8_rows_of_any_length_equal_the_reference(length):
    """PyTorch's operator is wrong or crashes for lengths that are no multiple of 16, so it must not get them."""
    held = round_to_nearest(torch.randn(10, length), "int8_channel")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weight = pack_weight(held)
    assert isinstance(weight, Int8Pack) == (length % 16 == 0)
    for rows in (1, 2, 5):
        x = torch.randn(rows, length)
        expected = x @ held.dequantize().T
        assert (weight.matmul(x) - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("name", ["int8_channel", "int4_g32_zp"])
def test_codes_at_any_address_give_the_same_product(name):
    """Tensors of a mapped file can start at any address, at which PyTorch's operator would crash."""
    held = round_to_nearest(torch.randn(64, 96), name)
    expected = pack_weight(held).matmul(torch.ones(4, 96))
    for offset in (1, 8, 33):
        room = torch.empty(held.codes.numel() + 64, dtype=held.codes.dtype)[
            offset : offset + held.codes.numel()
        ]
        moved = QuantizedTensor(
            held.format,
            held.shape,
            room.view(held.codes.shape).copy_(held.codes),
            held.scale,
            held.offset,
        )
        assert torch.equal(pack_weight(moved).matmul(torch.ones(4, 96)), expected)


@needs_layout
@pytest.mark.parametrize("rows", [1, 5, Int4Pack.few, Int4Pack.few + 1])
@pytest.mark.parametrize("name", INT4)
def test_int4_equals_its_reference(name, rows):
    held = round_to_nearest(weight(), name)
    layer = pack_weight(held)
    assert type(layer) is Int4Pack
    assert close_to_reference(layer, held, inputs(rows), int4_bound(held))


@needs_layout
@pytest.mark.parametrize("name", INT4)
def test_the_stated_bound_on_weights_holds_on_awkward_groups(name):
    awkward = weight()
    awkward[0], awkward[1], awkward[2] = 0.0, 5.0, 1e-6
    awkward[3], awkward[4, 7] = -awkward[3].abs(), 100.0
    held = round_to_nearest(awkward, name)
    kept = Int4Pack(held).quantized().dequantize()
    assert bool(((kept - held.dequantize()).abs() <= int4_bound(held) + 1e-9).all())
    assert torch.equal(kept[0], torch.zeros(256))


@needs_layout
def test_the_stored_weight_is_returned_bit_for_bit():
    for name in INT4:
        first = Int4Pack(round_to_nearest(weight(192, 512), name))
        again = Int4Pack(first.quantized())
        assert torch.equal(first.codes, again.codes) and torch.equal(first.scales, again.scales)
        assert torch.equal(first.unpacked(), again.unpacked())
    held = round_to_nearest(weight(), "int8_channel")
    back = Int8Pack(held).quantized()
    assert torch.equal(back.codes, held.codes) and torch.equal(back.scale, held.scale)


@needs_layout
@pytest.mark.parametrize(
    "name",
    ["int8_channel", "int4_g32_min", "int4_g64_zp", "int4_channel", "bf16", "fp32", "int3_g64_zp"],
)
def test_predicted_bytes_are_the_resident_bytes(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = pack_weight(round_to_nearest(weight(), name))
    storages = {
        b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in layer.buffers()
    }
    before = sum(storages.values())
    assert before == resident_nbytes(get_format(name), (128, 256))
    layer.matmul(inputs(64))  # prefill does not keep a second copy
    storages = {
        b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in layer.buffers()
    }
    assert sum(storages.values()) == before and not list(layer.parameters())


def test_rows_of_a_batch_do_not_depend_on_each_other():
    for name in ("int8_channel", "int4_g32_min"):
        layer = pack_weight(round_to_nearest(weight(), name))
        x = inputs(5)
        alone = torch.cat([layer.matmul(x[i : i + 1]) for i in range(5)])
        torch.testing.assert_close(layer.matmul(x), alone, rtol=2**-7, atol=2**-7)


def test_a_format_without_a_fast_kernel_warns_once_when_it_is_chosen():
    registry.warn_no_kernel.cache_clear()
    held = round_to_nearest(weight(), "int3_g64_zp")
    with pytest.warns(UserWarning, match="int3_g64_zp has no packed kernel"):
        layer = pack_weight(held)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack_weight(held)  # warned already
        pack_weight(held, "plain")
        pack_weight(round_to_nearest(weight(), "int8_channel"))
    torch.testing.assert_close(layer.matmul(inputs(3)), inputs(3) @ held.dequantize().T)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("int4_g64_zp", (128, 96)),
        ("int4_g32_min", (65, 64)),
        ("int4_g16_zp", (64, 64)),
        ("int4_tensor", (64, 64)),
        ("nvfp4", (64, 64)),
    ],
)
def test_shapes_that_the_operator_does_not_support_use_the_reference(name, shape):
    assert find_kernel(get_format(name), shape) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = pack_weight(round_to_nearest(torch.randn(shape), name))
    assert type(layer) is Plain and layer.matmul(torch.ones(1, shape[1])).shape == (1, shape[0])


def test_a_build_with_another_layout_falls_back(monkeypatch):
    monkeypatch.setattr(packed_torch, "layout_is_known", lambda: False)
    assert find_kernel(get_format("int4_g32_min"), (64, 64)) is None
    assert find_kernel(get_format("int8_channel"), (64, 64)) is Int8Pack


def test_bias_leading_dimensions_and_dtypes():
    held, bias = round_to_nearest(weight(), "int8_channel"), torch.arange(128.0)
    layer = pack_weight(held)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = inputs(6).view(2, 3, 256).to(dtype)
        out = layer.matmul(x, bias.to(dtype))
        assert out.dtype == dtype and out.shape == (2, 3, 128)
        exact = x.float() @ held.dequantize().T + bias
        torch.testing.assert_close(out.float(), exact, rtol=0.02, atol=0.05)
    transposed = inputs(256, 4).T  # not contiguous
    torch.testing.assert_close(layer.matmul(transposed), layer.matmul(transposed.contiguous()))


def test_changing_the_dtype_of_a_model_does_not_change_stored_bits():
    for name in ("int8_channel", "int4_g32_min", "fp8_e4m3", "bf16"):
        layer = pack_weight(
            round_to_nearest(weight(), name), "auto" if name.startswith("int") else "plain"
        )
        before = {n: (b.dtype, b.clone()) for n, b in layer.named_buffers()}
        layer.float().to(torch.float64).half()
        for n, b in layer.named_buffers():
            assert b.dtype == before[n][0] and torch.equal(
                b.view(torch.uint8), before[n][1].view(torch.uint8)
            )


def test_an_unknown_kernel_raises():
    with pytest.raises(BadRequest, match="auto, torch, native, plain"):
        pack_weight(round_to_nearest(weight(), "int8_channel"), "fast")


@pytest.mark.parametrize("name", ["int8_channel", "int4_g32_min", "bf16", "int4_channel"])
def test_embedding_rows(name):
    layer = pack_weight(round_to_nearest(weight(), name))
    index = torch.tensor([[0, 127], [5, 5]])
    torch.testing.assert_close(
        layer.rows(index, torch.float32), layer.unpacked().float()[index], rtol=2**-7, atol=1e-4
    )
    assert layer.rows(index, torch.bfloat16).dtype == torch.bfloat16
