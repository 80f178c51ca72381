"""Compare the Triton kernel with the plain reference, on a GPU or in Triton's interpreter."""

import dataclasses
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip(
    "triton", reason="Triton is not installed (it comes with PyTorch's CUDA builds)"
)

from labkit.formats import get_format, round_to_nearest
from labkit.kernels.cuda.triton_packed import TritonPack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [
    "int4_g64_zp",
    "int4_g32_min",
    "int4_g32_sym",
    "int4_g32_mid",
    "int8_channel",
    "int3_g64_zp",
    "int2_g32_zp",
    "int5_g32_min",
    "int6_channel_zp",
    "int3_channel",
    "int7_g16_zp",
    "fp8_e4m3",
]


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("name", FORMATS)
def test_it_equals_its_reference(name, rows):
    generator = torch.Generator().manual_seed(0)
    for shape in ((40, 96), (33, 80)):  # 80: a short last group, and a last block beyond the row
        held = round_to_nearest(torch.randn(shape, generator=generator), name).to(DEVICE)
        x = torch.randn(rows, shape[1], generator=generator).bfloat16().to(DEVICE)
        got = TritonPack(held).matmul(x).float()
        exact = x.float() @ held.dequantize().T
        torch.testing.assert_close(got, exact, rtol=2**-7, atol=2**-7 * float(exact.abs().max()))


def test_every_fp8_code_is_its_number():
    codes = torch.arange(256).view(2, 128)
    codes[codes % 128 == 127] = 0  # this code is NaN
    held = round_to_nearest(torch.randn(2, 128), "fp8_e4m3")
    held = dataclasses.replace(held, codes=codes.to(torch.uint8)).to(DEVICE)
    got = torch.cat(
        [TritonPack(held).few_rows(part) for part in torch.eye(128, device=DEVICE).split(16)]
    )  # float32
    torch.testing.assert_close(got.T, held.dequantize(), rtol=1e-6, atol=0)


def test_the_stored_bytes_are_those_of_the_format():
    held = round_to_nearest(torch.randn(8, 64), "int3_g64_zp")
    layer = TritonPack(held)
    assert torch.equal(layer.quantized().dequantize(), held.dequantize())
    assert sum(b.numel() * b.element_size() for b in layer.buffers()) == get_format(
        "int3_g64_zp"
    ).nbytes((8, 64))
    for name in ("nvfp4", "int8_tensor"):
        assert not TritonPack.supports(get_format(name), (8, 64), torch.device("cuda"))
