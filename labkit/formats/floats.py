"""Floating-point formats: FP8 e4m3 with a scale a row, and NVFP4 (blocks of 16 e2m1 values with e4m3 scales).

    fp8_e4m3   w = scale_row * code                     code: sign, 4 exponent, 3 mantissa bits, up to 448
    nvfp4      w = scale_tensor * scale_block * code    code: one of 0, .5, 1, 1.5, 2, 3, 4, 6 and a sign
               scale_tensor = max|w| / (448 * 6)        scale_block = max|block| / (6 * scale_tensor), at most 448

Source: the OCP 8-bit floating-point specification and NVIDIA's NVFP4 description. The values are checked *before* each
cast: a float8 cast saturates on CPU (even infinity becomes 448) and gives NaN elsewhere, so the cast itself tells nothing.

Loss: fp8 a sixteenth of the value, or scale * 2^-10 near zero. nvfp4 a quarter of the value at the widest step (4 to 6),
or a quarter of the block's scale near zero. A block smaller than 2^-9 of the largest scale keeps the smallest e4m3 scale:
its values lose at most a quarter of scale_tensor * 2^-9 each, and a block of zeros stays exactly zero.
"""

import torch
from torch import Tensor

from labkit.errors import BadRequest

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E4M3_SMALLEST = 2.0**-9
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 16


def to_e4m3(values: Tensor) -> Tensor:
    """Cast to float8 e4m3, refusing what does not fit instead of saturating."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not largest <= E4M3_MAX:  # catches NaN and infinity too
        raise BadRequest(
            f"{largest:g} does not fit fp8_e4m3, whose largest value is 448; scale or clamp the values first."
        )
    return values.to(torch.float8_e4m3fn)


def encode_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 [R, K] -> codes uint8 [R, K], scale float32 [R, 1]."""
    scale = (weight.abs().amax(1, keepdim=True) / E4M3_MAX).clamp(min=2.0**-126)
    return to_e4m3((weight / scale).clamp(-E4M3_MAX, E4M3_MAX)).view(torch.uint8), scale


def decode_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float() * scale


def encode_e2m1(values: Tensor) -> Tensor:
    """Float32 -> nibbles (sign in bit 3), nearest, ties to the even code; beyond 6 clamped to 6."""
    # bucketize sends a tie down; where the even code lies above, the bound is the number just below the tie.
    below = lambda x: float(torch.nextafter(torch.tensor(x), torch.tensor(0.0)))  # noqa: E731
    bounds = torch.tensor([0.25, below(0.75), 1.25, below(1.75), 2.5, below(3.5), 5.0], device=values.device)
    magnitude = torch.bucketize(values.abs(), bounds).to(torch.uint8)
    return magnitude | (torch.signbit(values) & (magnitude > 0)).to(torch.uint8) << 3  # no negative zero


def decode_e2m1(nibbles: Tensor) -> Tensor:
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=nibbles.device)
    return table[nibbles.long()]


def nvfp4_scales(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 blocks [R, blocks, 16] -> (block scales float32 [R, blocks], all in {0} or 2^-9..448; tensor scale [])."""
    reach = weight.abs().amax(-1)  # [R, blocks]
    tensor_scale = (reach.amax() / (E4M3_MAX * E2M1_MAX)).clamp(min=2.0**-126)
    scales = reach / E2M1_MAX / tensor_scale
    scales = torch.where(reach > 0, scales.clamp(E4M3_SMALLEST, E4M3_MAX), torch.zeros_like(scales))
    return scales, tensor_scale


def encode_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 [R, K] -> nibbles uint8 [R, K], block scales float8 [R, ceil(K/16)], tensor scale float32 []."""
    rows, length = weight.shape
    blocks = torch.nn.functional.pad(weight, (0, -length % BLOCK)).view(rows, -1, BLOCK)
    scales, tensor_scale = nvfp4_scales(blocks)
    stored = to_e4m3(scales)
    divisor = torch.where(stored.float() > 0, stored.float(), torch.ones_like(scales)) * tensor_scale
    return encode_e2m1(blocks / divisor[..., None]).view(rows, -1)[:, :length], stored, tensor_scale


def decode_nvfp4(nibbles: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
    rows, length = nibbles.shape
    blocks = torch.nn.functional.pad(nibbles, (0, -length % BLOCK)).view(rows, -1, BLOCK)
    values = decode_e2m1(blocks) * (scales.float() * tensor_scale)[..., None]
    return values.view(rows, -1)[:, :length]
