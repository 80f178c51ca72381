"""Formats as data: names, all-in bits, and predicted bytes equal to stored bytes."""

import subprocess
import sys

import pytest
import torch

from fakes import FORMATS
from labkit.errors import BadRequest
from labkit.formats import RECIPES, get_format, get_recipe, round_to_nearest

EXTRA = (
    "int5_g32_zp",
    "int6_channel_zp",
    "int7_tensor_min",
    "int4_tensor_zp",
    "int4_g32_mid",
    "int8_g7_zp",
    "int3_channel_min",
)


def test_describing_needs_no_torch():
    code = "import sys, labkit.formats as f; f.get_format('int4_g32_min').nbytes((3, 64)); f.get_recipe('int4'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "name, bits",
    [
        ("int4_g128_zp", 4.15625),  # 4 + 16/128 + 4/128
        ("int4_g32_min", 5.0),  # Q4_1: two float16 for 32 weights
        ("int4_g64_zp", 4.3125),
        ("int8_g32_sym", 8.5),  # 1.0625 B a value
        ("nvfp4", 4.5),
        ("int3_g64_zp", 3 + 19 / 64),
        ("bf16", 16.0),
    ],
)
def test_bits_are_all_in(name, bits):
    assert get_format(name).bits_per_weight() == bits


def test_a_shape_adds_what_the_limit_hides():
    assert get_format("nvfp4").nbytes((8, 32)) == 8 * 16 + 8 * 2 + 4  # one float32 for the tensor
    assert (
        get_format("int8_token").bits_per_weight((1000, 128)) == 8.25
    )  # float32 scale a token and head
    assert 28 * 8 * 2 * get_format("int8_token").nbytes((128_000, 128)) / 2**20 == 7218.75
    assert get_format("int4_g32_sym").groups(4304) == 135  # floor would give 134
    assert get_format("int4_channel").nbytes((2, 5)) == 2 * (3 + 2)  # five nibbles are three bytes


@pytest.mark.parametrize("shape", [(5, 64), (3, 84), (2, 7), (1, 1), (2, 3, 80), (64,)])
@pytest.mark.parametrize("name", FORMATS + EXTRA)
def test_predicted_bytes_are_the_stored_bytes(name, shape):
    quantized = round_to_nearest(torch.randn(shape), name)
    assert quantized.nbytes == get_format(name).nbytes(shape)
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in quantized.packed().values()
    }
    assert sum(storages.values()) == quantized.nbytes  # no view into something larger


@pytest.mark.parametrize(
    "name",
    [
        "int9_channel",
        "int4",
        "int4_g0_zp",
        "int4_g32_foo",
        "fp8",
        "",
        "INT4_channel",
        "int4_channel\n",
    ],
)
def test_an_unknown_name_is_refused_with_the_grammar(name):
    with pytest.raises(BadRequest, match="channel.token.tensor"):
        get_format(name)


def test_one_format_has_one_name():
    assert get_format("int4_g32") == get_format("int4_g32_sym")
    assert get_format("int8_channel_sym").name == "int8_channel"


def test_recipe_names():
    assert set(RECIPES) == {"fp32", "bf16", "int8", "int4"}
    assert (get_recipe("int4").blocks, get_recipe("int4").head) == ("int4_g32_min", "int8_channel")
    assert (get_recipe("int3_g64_zp").blocks, get_recipe("int3_g64_zp").embedding) == (
        "int3_g64_zp",
        "int8_channel",
    )
    with pytest.raises(BadRequest, match="int8, int4"):
        get_recipe("int5")
