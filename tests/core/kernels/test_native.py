"""Build and choose the native kernels; compare products with the reference on each instruction set."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labkit.errors import BadRequest
from labkit.formats import round_to_nearest
from labkit.kernels.native import build as native
from labkit.kernels.native.packed import NativePack, block_nbytes, kind_of
from labkit.kernels.registry import pack_weight, resident_nbytes
from labkit.quant.linear import QuantizedEmbedding, QuantizedLinear

FORMATS = [
    "bf16",
    "int4_channel",
    "int4_g32_min",
    "int4_g64_zp",
    "int4_g32_sym",
    "int8_channel",
    "int8_tensor",
    "int8_g32_sym",
    "int8_g64_min",
]
SHAPES = [
    (1, 1, False),
    (50, 70, False),
    (48, 64, False),
    (36, 100, True),
]  # no multiples of 16 or 32; a pair


def rounded(x, format):
    """Return the activations as the kernels round them."""
    if format == "bf16":
        rounds = os.environ.get("LABKIT_NATIVE") == "avx512bf16"
        return x.bfloat16().double() if rounds else x.double()
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    step = groups.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(step > 0, (groups * (127 / groups.abs().amax(-1, keepdim=True))).round(), 0)
    return (codes.double() * step.double()).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("format", FORMATS)
def test_a_product_equals_the_reference_on_rounded_activations(instruction_set, format):
    generator = torch.Generator().manual_seed(1)
    for rows, cols, pair in SHAPES:
        held = round_to_nearest(torch.randn(rows, cols, generator=generator), format)
        bias = torch.randn(rows, generator=generator)
        matrix = NativePack(held, pair=pair, bias=bias)
        assert torch.allclose(matrix.unpacked(), held.dequantize(), rtol=1e-6, atol=1e-6)
        for tokens in (1, 2, 5, 8, 9, 19):
            x = (
                torch.randn(tokens, cols, generator=generator)
                * torch.rand(tokens, 1, generator=generator).mul(8).exp()
            )
            want = rounded(x, format) @ held.dequantize().double().T + bias
            size = (
                x.double().abs() @ held.dequantize().double().abs().T + 1
            )  # the rounding error of float32 sums is proportional to this
            assert ((matrix.matmul(x) - want).abs() / size).max() < 6e-6, (rows, cols, tokens)


@pytest.mark.parametrize("format", ["int4_g32_min", "int8_channel"])
def test_extreme_activations_stay_within_half_a_step(instruction_set, format):
    held = round_to_nearest(torch.randn(32, 64, generator=torch.Generator().manual_seed(2)), format)
    matrix, weight = NativePack(held), held.dequantize().double()
    outlier = torch.full((1, 64), 1e-3)
    outlier[0, 7] = 1e4
    for x in (
        torch.zeros(1, 64),
        torch.full((1, 64), 1e-35),
        torch.full((1, 64), 3e30),
        outlier,
        -outlier,
    ):
        y = matrix.matmul(x)
        step = x.unflatten(1, (-1, 32)).abs().amax(-1).double() / 127  # [1, groups]
        bound = (step.repeat_interleave(32, 1) / 2) @ weight.abs().T
        assert (
            (y - x.double() @ weight.T).abs() <= bound * 1.01 + 1e-5 * x.abs().max() + 1e-30
        ).all()


def test_rows_of_a_batch_are_bit_for_bit_the_single_rows(instruction_set):
    generator = torch.Generator().manual_seed(3)
    for format in ("bf16", "int4_g32_min", "int8_channel"):
        matrix = NativePack(round_to_nearest(torch.randn(40, 96, generator=generator), format))
        x = torch.randn(21, 96, generator=generator)
        assert torch.equal(matrix.matmul(x), torch.cat([matrix.matmul(row[None]) for row in x]))


def test_bytes_equal_those_of_the_format_without_padding():
    held = round_to_nearest(torch.randn(64, 128), "int4_g32_min")
    assert (
        NativePack(held).nbytes
        == block_nbytes("int4_g32_min", (64, 128))
        == held.nbytes
        == 64 * 128 * 5 // 8
    )
    held = round_to_nearest(torch.randn(64, 128), "int8_channel")
    assert (
        NativePack(held).nbytes == 64 * 128 + 64 * 4
    )  # scales are stored as float32 for every format


def test_packed_bytes_are_where_the_kernel_reads_them():
    codes = (
        torch.arange(16 * 32).view(16, 32) % 16
    ).float()  # scale 1 and minimum 0: each code equals its number
    blocks = NativePack(round_to_nearest(codes, "int4_g32_min")).blocks
    lines = blocks[64:].view(4, 16, 4)  # after 16 scales and 16 minima
    assert lines[1, 5, 2] == int(codes[5, 4 + 2]) | int(codes[5, 16 + 4 + 2]) << 4
    assert blocks[:64].view(torch.float16).tolist() == [1.0] * 16 + [0.0] * 16


def test_a_format_without_a_kernel_raises_with_its_name():
    assert (
        kind_of("int3_g64_zp") is None
        and kind_of("nvfp4") is None
        and kind_of("int4_g16_sym") is None
    )
    with pytest.raises(BadRequest, match="int3_g64_zp"):
        NativePack(round_to_nearest(torch.randn(16, 64), "int3_g64_zp"))


def test_an_environment_variable_turns_the_kernels_off(monkeypatch):
    monkeypatch.setenv("LABKIT_NATIVE", "off")
    assert "LABKIT_NATIVE" in native.unsupported_reason()
    monkeypatch.setenv("LABKIT_NATIVE", "sse9")
    assert "'sse9'" in native.unsupported_reason() and "portable" in native.unsupported_reason()


def test_without_a_compiler_the_reason_says_so(monkeypatch, cache_folder):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "compiler" in native.unsupported_reason()


def test_a_cpu_without_wide_registers_uses_the_portable_kernels(monkeypatch):
    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset({"sse2"}))
    monkeypatch.delenv("LABKIT_NATIVE", raising=False)
    assert native.chosen() == "portable"
    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset(native.SETS["avx2"][0].split()))
    assert native.chosen() == "avx2"


def test_a_failing_build_leaves_no_library_and_a_reason(monkeypatch, cache_folder):
    monkeypatch.setenv("LABKIT_NATIVE", "portable")
    monkeypatch.setattr(native, "FLAGS", "--no-such-flag")
    assert "did not compile" in native.unsupported_reason()
    assert not list((cache_folder / "native").iterdir())


def test_a_cache_folder_that_cannot_be_written_raises(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(native.NotNative, match="did not compile.*file"):
        native.build("portable")


def test_torch_and_the_kernels_share_one_openmp_library():
    if native.unsupported_reason() is not None or not Path("/proc/self/maps").exists():
        pytest.skip(native.unsupported_reason() or "no /proc here")
    native.library()
    files = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line
    }
    assert len([f for f in files if Path(f).name.startswith(("libgomp", "libiomp", "libomp"))]) <= 1


@pytest.mark.slow
def test_two_processes_that_build_at_once_both_get_a_whole_library(cache_folder):
    code = "from labkit.kernels.native import build as native; import sys; sys.exit(native.unsupported_reason() is not None)"
    run = [sys.executable, "-c", code]
    both = [subprocess.Popen(run, env=os.environ | {"LABKIT_NATIVE": "portable"}) for _ in range(2)]
    assert [process.wait(timeout=200) for process in both] == [0, 0]
    assert (
        len(list((cache_folder / "native").glob("*.so")))
        == 1
        == len(list((cache_folder / "native").iterdir()))
    )


def test_native_weights_have_the_interface_of_packed_weights():
    held = round_to_nearest(
        torch.randn(40, 96, generator=torch.Generator().manual_seed(4)), "int4_g32_min"
    )
    layer, table = QuantizedLinear(held, kernel="native"), QuantizedEmbedding(held, kernel="native")
    assert type(layer.weight) is NativePack and layer.weight.format is held.format
    assert layer.weight.nbytes == resident_nbytes(held.format, held.shape, kernels="native")
    index = torch.tensor([[3, 39], [0, 3]])
    torch.testing.assert_close(table(index), held.dequantize()[index])
    x = torch.randn(2, 3, 96)
    before, twin = layer(x), copy.deepcopy(layer)
    assert before.shape == (2, 3, 40) and twin.to(torch.float16)(x).dtype == x.dtype
    layer.weight.blocks.zero_()  # a copy has its own memory
    assert torch.equal(twin(x), before) and not layer(x).any()
    with pytest.raises(BadRequest, match="CPU"):
        layer.to("meta")
    with pytest.raises(BadRequest, match="native kernels do not support nvfp4"):
        pack_weight(round_to_nearest(torch.randn(16, 64), "nvfp4"), "native")
