"""Pack keys or values of a layer into codes and scales, in the format of a `Part`.

    value = minimum + scale * code
    codes            uint8 [B, K, tokens, ceil(D * bits / 8)], lowest bits first;
                     float8 and e2m1 as their bits
    scale, minimum   [B, K, tokens, groups], or one entry per block (`Store.per`)

A group has one scale. It is the channels of a token, 32 tokens of a channel, or a whole
block.

Scale and minimum are rounded first. Then the codes are chosen for the rounded values,
so the error is at most half a step. bfloat16 scales never overflow; float16 ends at
65,504, and some key channels reach thousands. Cost of reading: one pass over the codes
and two over their numbers. If a token has one scale, attention can apply it to the
scores instead (`raw`), which saves those two passes. Sources: KIVI (arXiv 2402.02750);
NVFP4 and e4m3 as in `labkit.formats`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from labkit.cache.contract import grown
from labkit.formats import floats
from labkit.formats.packing import pack, unpack
from labkit.plan.kv_formats import Part

SCALES = {8: torch.float8_e4m3fn, 16: torch.bfloat16, 32: torch.float32}
TINY = 2.0**-126  # a group of zeros is divided by this, not by 0


class Store(NamedTuple):
    """One tensor of a packed part: [B, heads, slots / per, width]."""

    heads: int
    per: int  # tokens per entry
    width: int
    dtype: torch.dtype


def layout(part: Part, heads: int, width: int) -> dict[str, Store]:
    """Return the tensors, by name, that store `part` for K heads of D numbers."""
    if part.axis == "token":
        scale = (heads, 1, -(-width // (part.group or width)))
    else:
        scale = (heads, part.block, width) if part.axis == "channel" else (1, part.block, 1)
    stores = {
        "codes": Store(heads, 1, -(-width * part.bits // 8), torch.uint8),
        "scale": Store(*scale, SCALES[part.scale_bits]),
    }
    if part.zero_bits:
        stores["minimum"] = Store(*scale, SCALES[part.zero_bits])
    if part.code == "nvfp4":
        stores["block_scale"] = Store(1, part.block, 1, torch.float32)
    return stores


def resized(
    stores: dict[str, Store], old: dict[str, Tensor], rows: int, slots: int, device: torch.device
) -> dict[str, Tensor]:
    """Return tensors for `slots` slots per row; `old` fills their start, zeros the rest."""
    return {
        name: grown(old.get(name), (rows, s.heads, slots // s.per, s.width), s.dtype, device)
        for name, s in stores.items()
    }


def folds(part: Part) -> bool:
    """Return True if each token has one scale, which can be applied to its score."""
    return part.axis == "token" and part.group is None


def grouped(numbers: Tensor, part: Part) -> tuple[Tensor, tuple[int, ...]]:
    """Return [B, K, T, D] in groups, and the dimensions that share a scale."""
    B, K, T, D = numbers.shape
    if part.axis == "token":
        group = part.group or D
        missing = -D % group
        if missing:  # a short last group repeats its last number: its range does not change
            numbers = torch.cat([numbers, numbers[..., -1:].expand(B, K, T, missing)], -1)
        return numbers.view(B, K, T, -1, group), (4,)
    shared = (3,) if part.axis == "channel" else (1, 3, 4)
    return numbers.reshape(B, K, T // part.block, part.block, D), shared


def encode(numbers: Tensor, part: Part) -> dict[str, Tensor]:
    """Pack [B, K, T, D] into the tensors of `layout`; T is a multiple of the block."""
    B, K, T, D = numbers.shape
    groups, shared = grouped(numbers.float(), part)
    if part.code == "nvfp4":
        return _encode_nvfp4(groups, part, D)
    packed = {}
    if part.zero_bits:
        if len(shared) == 1:
            low, high = groups.aminmax(dim=shared[0], keepdim=True)
        else:
            low, high = groups.amin(shared, keepdim=True), groups.amax(shared, keepdim=True)
        dtype, levels = SCALES[part.zero_bits], (1 << part.bits) - 1
        minimum = low.to(dtype)
        below = (low - low.abs() * torch.finfo(dtype).eps).to(dtype)
        minimum = torch.where(minimum.float() > low, below, minimum)
        scale = ((high - minimum.float()) / levels).to(SCALES[part.scale_bits])
        codes = (groups - minimum.float()) / scale.float().clamp(min=TINY)
        codes = codes.round_().clamp_(0, levels)
        packed["minimum"] = minimum
    else:
        reach = floats.E4M3_MAX if part.code == "fp8" else (1 << (part.bits - 1)) - 1
        scale = (groups.abs().amax(shared, keepdim=True) / reach).clamp(min=TINY)
        scale = scale.to(SCALES[part.scale_bits])
        codes = (groups / scale.float()).clamp_(-reach, reach)
        codes = codes if part.code == "fp8" else codes.round_()
    packed["scale"] = scale
    by_token = part.axis == "token"
    packed = {n: t.flatten(-2) if by_token else t.squeeze(-2) for n, t in packed.items()}
    packed["codes"] = _pack(codes.reshape(B, K, T, -1)[..., :D], part)
    return packed


def _eight_bits(part: Part) -> torch.dtype:
    if part.code == "fp8":
        return torch.float8_e4m3fn
    return torch.uint8 if part.zero_bits else torch.int8


def _pack(codes: Tensor, part: Part) -> Tensor:
    if part.bits == 8:  # values are clamped first, so the cast does not saturate
        return codes.to(_eight_bits(part)).view(torch.uint8)
    codes = codes.to(torch.uint8 if part.zero_bits else torch.int16)
    return pack(codes.flatten(0, -2), part.bits).view(*codes.shape[:-1], -1)


def _encode_nvfp4(groups: Tensor, part: Part, width: int) -> dict[str, Tensor]:
    B, K, T = groups.shape[:3]
    reach = groups.abs().amax(-1)  # [B, K, T, groups]
    by_block = reach.view(B, K, T // part.block, part.block, -1).amax((1, 3, 4))  # [B, blocks]
    block_scale = (by_block / (floats.E4M3_MAX * floats.E2M1_MAX)).clamp(min=TINY)
    block_scale = block_scale[:, None, :, None]  # [B, 1, blocks, 1]
    each = block_scale.repeat_interleave(part.block, 2)  # [B, 1, T, 1]
    scale = (reach / floats.E2M1_MAX / each).clamp(floats.E4M3_SMALLEST, floats.E4M3_MAX)
    scale = floats.to_e4m3(torch.where(reach > 0, scale, 0.0))
    divisor = (scale.float() * each).clamp(min=TINY)[..., None]
    codes = floats.encode_e2m1(groups / divisor).view(B, K, T, -1)[..., :width]
    packed = pack(codes.flatten(0, -2), 4).view(B, K, T, -1)
    return {"codes": packed, "scale": scale, "block_scale": block_scale}


def raw(packed: dict[str, Tensor], part: Part, width: int, buffer: Tensor | None = None) -> Tensor:
    """Return the codes as float32 [B, K, T, D], without scale and minimum.

    8-bit codes are written into `buffer`, if given.
    """
    codes = packed["codes"]
    if part.bits == 8:
        codes = codes.view(_eight_bits(part))
        if buffer is None:
            return codes.float()
        return buffer[: codes.numel()].view(codes.shape).copy_(codes)
    shape = (*codes.shape[:-1], width)
    signed = not part.zero_bits and part.code == "int"
    codes = unpack(codes.reshape(-1, codes.shape[-1]), part.bits, width, signed=signed)
    codes = floats.decode_e2m1(codes) if part.code == "nvfp4" else codes.float()
    return codes.view(shape)


def decode(packed: dict[str, Tensor], part: Part, width: int) -> Tensor:
    """Decode packed tensors to float32 [B, K, T, D]."""
    codes = raw(packed, part, width)
    B, K, T, D = codes.shape
    if T == 0:
        return codes
    if part.axis == "token":
        group, shared = part.group or D, -1  # `shared`: the dimension that has one scale
        groups = pad(codes, (0, -D % group)).view(B, K, T, -1, group)
    else:
        groups, shared = codes.view(B, K, -1, part.block, D), -2
    scale = packed["scale"].float().unsqueeze(shared)
    if part.code == "nvfp4":
        scale = scale * packed["block_scale"].repeat_interleave(part.block, 2)[..., None]
    groups = groups * scale
    if part.zero_bits:
        groups = groups + packed["minimum"].float().unsqueeze(shared)
    return groups.reshape(B, K, T, -1)[..., :D]
