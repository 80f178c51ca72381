"""Floating-point formats: FP8 e4m3 with a scale per row, and NVFP4.

    fp8_e4m3   w = scale_row * code                     code: sign, 4 exponent, 3 mantissa bits
    nvfp4      w = scale_tensor * scale_block * code    code: sign and 0, .5, 1, 1.5, 2, 3, 4, 6
               scale_tensor = max|w| / (448 * 6)        blocks of 16 weights
               scale_block = max|block| / (6 * scale_tensor), an e4m3 number, at most 448

Source: the OCP 8-bit floating-point specification and NVIDIA's description of NVFP4.
Values are checked *before* each cast: a float8 cast saturates on CPU (even infinity
becomes 448) and gives NaN elsewhere, so the result of the cast does not show an
overflow.

Maximum error: for fp8_e4m3 a sixteenth of the value, or scale * 2^-10 near zero. For
nvfp4 a quarter of the value at the widest step (4 to 6), or a quarter of the block's
scale near zero. A block smaller than 2^-9 of the largest scale gets the smallest e4m3
scale: its values lose at most a quarter of scale_tensor * 2^-9 each. A block of zeros
stays exactly zero.
"""

import torch
from torch import Tensor

from labkit.errors import BadRequest

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E4M3_SMALLEST = 2.0**-9
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 16


def to_e4m3(values: Tensor) -> Tensor:
    """Cast to float8 e4m3. Raises BadRequest for a value beyond 448."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not largest <= E4M3_MAX:  # also true for NaN
        raise BadRequest(
            f"{largest:g} does not fit fp8_e4m3, whose largest value is 448; scale or clamp first."
        )
    return values.to(torch.float8_e4m3fn)


def encode_fp8(weight: Tensor) -> dict[str, Tensor]:
    """Float32 [R, K] -> codes uint8 [R, K], scale float32 [R, 1]."""
    scale = (weight.abs().amax(1, keepdim=True) / E4M3_MAX).clamp(min=2.0**-126)
    codes = to_e4m3((weight / scale).clamp(-E4M3_MAX, E4M3_MAX))
    return {"codes": codes.view(torch.uint8), "scale": scale}


def decode_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float() * scale


def encode_e2m1(values: Tensor) -> Tensor:
    """Round float32 to nibbles, ties to the even code, clamped to 6; sign in bit 3."""
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
    # bucketize sends a tie down. If the even code is above, the bound is the next
    # number below.
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros_like(bounds[1::2]))
    magnitude = torch.bucketize(values.abs(), bounds).to(torch.uint8)
    sign = (torch.signbit(values) & (magnitude > 0)).to(torch.uint8)  # no negative zero
    return magnitude | sign << 3


def decode_e2m1(nibbles: Tensor) -> Tensor:
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=nibbles.device)
    return table[nibbles.long()]


def nvfp4_scales(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks [R, blocks, 16] -> block scales [R, blocks] and tensor scale [], float32.

    Block scales are 0 or between 2^-9 and 448.
    """
    reach = weight.abs().amax(-1)  # [R, blocks]
    tensor_scale = (reach.amax() / (E4M3_MAX * E2M1_MAX)).clamp(min=2.0**-126)
    scales = (reach / E2M1_MAX / tensor_scale).clamp(E4M3_SMALLEST, E4M3_MAX)
    return torch.where(reach > 0, scales, 0.0), tensor_scale


def _blocks(values: Tensor) -> Tensor:
    """[R, K] -> [R, ceil(K/16), 16], padded with zeros."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK))
    return padded.view(values.shape[0], -1, BLOCK)


def encode_nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """Float32 [R, K] -> nibbles uint8 [R, K], scales float8 [R, ceil(K/16)] and float32 []."""
    blocks = _blocks(weight)
    scales, tensor_scale = nvfp4_scales(blocks)
    stored = to_e4m3(scales)
    divisor = torch.where(stored.float() > 0, stored.float(), 1.0) * tensor_scale
    nibbles = encode_e2m1(blocks / divisor[..., None]).flatten(1)
    codes = nibbles[:, : weight.shape[1]]
    return {"codes": codes, "scale": stored, "tensor_scale": tensor_scale}


def decode_nvfp4(codes: Tensor, scale: Tensor, tensor_scale: Tensor) -> Tensor:
    values = decode_e2m1(_blocks(codes)) * (scale.float() * tensor_scale)[..., None]
    return values.flatten(1)[:, : codes.shape[1]]
