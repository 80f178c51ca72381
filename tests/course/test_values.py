"""The values a format can hold: those that quantising a ramp really gives, each of them, and no other."""

import pytest
import torch

from labkit.errors import BadRequest
from labkit.formats import dequantize, round_to_nearest
from labkit_course.experiments.representable import representable


@pytest.mark.parametrize(
    "name",
    [
        "int3_channel",
        "int4_channel",
        "int8_channel",
        "int4_g64_min",
        "int4_g64_zp",
        "fp8_e4m3",
        "nvfp4",
    ],
)
def test_they_are_what_quantising_gives(name):
    size = 16 if name == "nvfp4" else 64 if "_g64" in name else 4096
    ends = torch.tensor([-1.0, 1.0])
    found = set()
    for start in torch.linspace(-1, 1, 4097).split(size - 2):  # each group spans -1 .. 1
        row = torch.cat([ends, start])[:size]
        row = torch.cat([row, row.new_zeros(size - len(row))])
        found |= set(dequantize(round_to_nearest(row[None], name))[0].tolist())
    listed = representable(name)
    for value in found:
        assert min(abs(value - one) for one in listed) < 4e-3, value
    coarse = [one for one in listed if abs(one) > 0.01]
    for value in coarse if name != "int8_channel" else coarse[::8]:
        assert min(abs(value - one) for one in found) < 4e-3, value


def test_zero_is_a_value_with_a_zero_point_and_ranges_include_it():
    assert min(map(abs, representable("int4_g64_zp", -0.3, 1.0))) == 0
    assert len(representable("int4_channel")) == 15 and len(representable("fp8_e4m3")) == 253
    with pytest.raises(BadRequest, match="includes 0"):
        representable("int4_channel", 0.5, 1.0)
    with pytest.raises(BadRequest, match="too many numbers"):
        representable("fp32")
