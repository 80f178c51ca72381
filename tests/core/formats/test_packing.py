"""Packed bytes are pinned: a round trip alone proves nothing about layout."""

import pytest
import torch

from labkit.errors import BadRequest
from labkit.formats import pack, round_to_nearest, unpack
from labkit.formats.floats import encode_e2m1
from labkit.formats.integer import Grid
from labkit.formats.names import get_format
from labkit.formats.tensor import QuantizedTensor, from_codes


@pytest.mark.parametrize(
    "bits, codes, expected",
    [
        (4, range(16), "10 32 54 76 98 ba dc fe"),
        (2, [0, 1, 2, 3, 3], "e4 03"),
        (3, range(8), "88 c6 fa"),
        (3, [7, 0, 5], "47 01"),  # 0b101_000_111
        (8, [0, 1, 128, 255], "00 01 80 ff"),
        (5, [1, 2, 3, 31], "41 8c 0f"),
        (4, [9], "09"),
        (4, [-8, 7, -1, 0], "78 0f"),  # two's complement: nibble 8 is -8
        (8, [-128, -1, 127], "80 ff 7f"),
    ],
)
def test_pinned_bytes(bits, codes, expected):
    packed = pack(torch.tensor([list(codes)]), bits)
    assert packed[0].tolist() == list(bytes.fromhex(expected))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("length", [1, 3, 7, 8, 9, 33])
def test_every_code_comes_back_at_every_length(bits, length):
    generator = torch.Generator().manual_seed(bits * 100 + length)
    codes = torch.randint(0, 1 << bits, (3, length), generator=generator)
    assert torch.equal(unpack(pack(codes, bits), bits, length).long(), codes)
    signed = codes - (1 << (bits - 1))
    assert torch.equal(unpack(pack(signed, bits), bits, length, signed=True).long(), signed)


@pytest.mark.parametrize("bits", range(1, 9))
def test_no_rows_are_no_bytes(bits):
    packed = pack(torch.zeros(0, 20, dtype=torch.int64), bits)
    assert packed.shape == (0, -(-20 * bits // 8)) and unpack(packed, bits, 20).shape == (0, 20)


def test_the_sign_of_nibble_eight():
    assert unpack(torch.tensor([[0x78]], dtype=torch.uint8), 4, 2, signed=True).tolist() == [
        [-8, 7]
    ]
    assert unpack(torch.tensor([[0x78]], dtype=torch.uint8), 4, 2).tolist() == [[8, 7]]


def test_codes_that_do_not_fit_and_lengths_that_lie_are_refused():
    with pytest.raises(BadRequest, match="do not fit 4 bits"):
        pack(torch.tensor([[16]]), 4)
    with pytest.raises(BadRequest, match="do not fit 4 bits"):
        pack(torch.tensor([[-1, 15]]), 4)
    with pytest.raises(BadRequest, match="bytes per row"):
        unpack(torch.zeros(1, 3, dtype=torch.uint8), 4, 8)


@pytest.mark.parametrize("zero", [0, 7, 15])
def test_a_zero_point_is_stored_as_it_is(zero):
    """One family stores the zero point minus one; symmetric checkpoints hide it."""
    grid = Grid(
        get_format("int4_channel_zp"),
        torch.tensor([[0.5]]),
        torch.tensor([[zero]], dtype=torch.uint8),
    )
    quantized = from_codes(torch.arange(16)[None], grid, (1, 16))
    assert quantized.packed()["offset"].tolist() == [[zero]]
    assert quantized.packed()["codes"][0].tolist() == list(bytes.fromhex("1032547698badcfe"))
    assert quantized.dequantize()[0].tolist() == [(code - zero) * 0.5 for code in range(16)]


@pytest.mark.parametrize(
    ("row", "format", "codes", "scale", "offset"),
    [
        ([-7.0, 7.0, 1.0, 0.0], "int4_g4_sym", "79 01", 1.0, None),
        ([-3.0, 12.0, 0.0, 1.0], "int4_g4_zp", "f0 43", 1.0, 3),
        ([10.0, 25.0, 11.0, 12.0], "int4_g4_min", "f0 21", 1.0, 10.0),
        ([10.0, 25.0, 11.0, 12.0], "int4_g4_mid", "f0 21", 1.0, 18.0),  # 10 + 8 * 1
        ([-127.0, 127.0, 1.0], "int8_channel", "81 7f 01", 1.0, None),
        ([448.0, -1.0], "fp8_e4m3", "7e b8", 1.0, None),
    ],
)
def test_whole_tensors_are_pinned_and_come_back(row, format, codes, scale, offset):
    quantized = round_to_nearest(torch.tensor([row]), format)
    packed = quantized.packed()
    assert packed["codes"].tolist() == [list(bytes.fromhex(codes))]
    assert packed["scale"].tolist() == [[scale]]
    assert ("offset" in packed) == (offset is not None)
    if offset is not None:
        assert packed["offset"].tolist() == [[offset]]
    back = QuantizedTensor.from_packed(quantized.format, quantized.shape, packed)
    assert back.codes.dtype == quantized.codes.dtype and torch.equal(back.codes, quantized.codes)
    assert torch.equal(back.dequantize(), quantized.dequantize())


def test_e2m1_nibbles_and_their_ties():
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -6.0, 9.0])
    assert encode_e2m1(values).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 15, 7]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25])
    assert encode_e2m1(ties).tolist() == [
        0,
        2,
        2,
        4,
        4,
        6,
        6,
        0,
    ]  # to the even code; no negative zero
