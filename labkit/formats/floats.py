"""Floating-point formats: FP8 e4m3 with one scale per row, and NVFP4.

    fp8_e4m3   w = scale_row * code                     code: sign, 4 exponent, 3 mantissa bits
    nvfp4      w = scale_tensor * scale_block * code    code: sign and 0, .5, 1, 1.5, 2, 3, 4, 6
               scale_tensor = max|w| / (448 * 6)        blocks of 16 weights
               scale_block = max|block| / (6 * scale_tensor), an e4m3 number, maximum 448

Source: the OCP 8-bit floating-point specification and NVIDIA's description of NVFP4.
Values are checked *before* each cast. A cast to float8 saturates on CPU (even infinity
becomes 448) and gives NaN on other devices, so its result does not show an overflow.

Maximum error of fp8_e4m3: a sixteenth of the value, or scale * 2^-10 near zero. Maximum
error of nvfp4: a quarter of the value between 4 and 6, the widest step, or a quarter of
the block's scale near zero. If the scale of a block is below the smallest e4m3 number
2^-9, that number is used, and each value of the block loses up to a quarter of
scale_tensor * 2^-9. A block of zeros stays exactly zero.
"""

import torch
from torch import Tensor

from labkit.errors import BadRequest

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E4M3_SMALLEST = 2.0**-9
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 16


def to_e4m3(values: Tensor) -> Tensor:
    """Cast to float8 e4m3. Raises BadRequest for NaN and for a magnitude above 448."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not largest <= E4M3_MAX:  # also true for NaN
        raise BadRequest(f"fp8_e4m3 cannot store {largest:g}; scale or clamp to 448 first.")
    return values.to(torch.float8_e4m3fn)


def encode_fp8(weight: Tensor) -> dict[str, Tensor]:
    """Encode float32 [R, K] as codes uint8 [R, K] and scales float32 [R, 1]."""
    scale = (weight.abs().amax(1, keepdim=True) / E4M3_MAX).clamp(min=2.0**-126)
    codes = to_e4m3((weight / scale).clamp(-E4M3_MAX, E4M3_MAX))
    return {"codes": codes.view(torch.uint8), "scale": scale}


def decode_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float() * scale


def encode_e2m1(values: Tensor) -> Tensor:
    """Round float32 to nibbles with the sign in bit 3; ties go to the even code.

    Values beyond 6 are clamped.
    """
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
    # bucketize rounds a tie down. At every second bound the even code is above, so use
    # the next smaller number as the bound.
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros_like(bounds[1::2]))
    magnitude = torch.bucketize(values.abs(), bounds).to(torch.uint8)
    sign = (torch.signbit(values) & (magnitude > 0)).to(torch.uint8)  # no negative zero
    return magnitude | sign << 3


def decode_e2m1(nibbles: Tensor) -> Tensor:
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=nibbles.device)
    return table[nibbles.long()]


def nvfp4_scales(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales of blocks [R, blocks, 16] and of the tensor, in float32.

    The scales of blocks [R, blocks] are 0 or between 2^-9 and 448. The tensor's scale
    has no dimensions.
    """
    reach = weight.abs().amax(-1)  # [R, blocks]
    tensor_scale = (reach.amax() / (E4M3_MAX * E2M1_MAX)).clamp(min=2.0**-126)
    scales = (reach / E2M1_MAX / tensor_scale).clamp(E4M3_SMALLEST, E4M3_MAX)
    return torch.where(reach > 0, scales, 0.0), tensor_scale


def _blocks(values: Tensor) -> Tensor:
    """Pad [R, K] with zeros and view it as [R, ceil(K/16), 16]."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK))
    return padded.view(values.shape[0], -1, BLOCK)


def encode_nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """Encode float32 [R, K] as nibbles, scales of blocks and a scale of the tensor.

    The nibbles are uint8 [R, K], one per byte; the scales of blocks are float8
    [R, ceil(K/16)]; the tensor's scale is float32 without dimensions.
    """
    blocks = _blocks(weight)
    scales, tensor_scale = nvfp4_scales(blocks)
    stored = to_e4m3(scales)
    divisor = torch.where(stored.float() > 0, stored.float(), 1.0) * tensor_scale
    codes = encode_e2m1(blocks / divisor[..., None]).flatten(1)[:, : weight.shape[1]]
    return {"codes": codes, "scale": stored, "tensor_scale": tensor_scale}


def decode_nvfp4(codes: Tensor, scale: Tensor, tensor_scale: Tensor) -> Tensor:
    values = decode_e2m1(_blocks(codes)) * (scale.float() * tensor_scale)[..., None]
    return values.flatten(1)[:, : codes.shape[1]]
