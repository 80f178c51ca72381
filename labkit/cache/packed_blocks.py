"""Keys or values of one layer as packed codes and scales: how a `Part` of a KV format lies in memory.

    value = minimum + scale * code        over a group: a token's channels, 32 tokens of a channel, or a whole block
    codes     uint8 [B, K, tokens, ceil(D * bits / 8)], lowest bits first; float8 and e2m1 codes as their bits
    scale, minimum   one entry a token [B, K, tokens, groups], or one a block of tokens: the `per` of their `Store`

Scale and minimum are rounded first and the codes chosen for what is stored, so that the error stays half a step.
Stored as bfloat16 they never overflow (a float16 scale ends at 65,504, and keys have channels in the thousands).
Cost of reading: one pass over the codes and two over their numbers; "token" scales can be folded into the attention
scores instead (`raw`), which saves those two. Sources: KIVI (arXiv 2402.02750); NVFP4 and e4m3 as in `labkit.formats`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from labkit.formats.floats import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_SMALLEST,
    decode_e2m1,
    encode_e2m1,
    to_e4m3,
)  # fmt: skip
from labkit.formats.packing import pack, unpack
from labkit.plan.kv_formats import Part

SCALES = {8: torch.float8_e4m3fn, 16: torch.bfloat16, 32: torch.float32}
TINY = 2.0**-126  # a group of zeros divides by this, not by 0


class Store(NamedTuple):
    """One tensor of a packed part: [B, heads, slots / per, width]."""

    heads: int
    per: int  # tokens an entry
    width: int
    dtype: torch.dtype


def layout(part: Part, heads: int, width: int) -> dict[str, Store]:
    """The tensors that hold `part` for K heads of D numbers, by name."""
    if part.axis == "token":
        scale = (heads, 1, -(-width // (part.group or width)))
    else:
        scale = (heads, part.group, width) if part.axis == "channel" else (1, part.group, 1)
    stores = {"codes": Store(heads, 1, -(-width * part.bits // 8), torch.uint8),
              "scale": Store(*scale, SCALES[part.scale_bits])}  # fmt: skip
    if part.zero_bits:
        stores["minimum"] = Store(*scale, SCALES[part.zero_bits])
    if part.code == "nvfp4":
        stores["block_scale"] = Store(1, part.block, 1, torch.float32)
    return stores


def folds(part: Part) -> bool:
    """Whether a token has one scale, which may then be applied to its score instead of its numbers."""
    return part.axis == "token" and part.group is None


def grouped(numbers: Tensor, part: Part) -> tuple[Tensor, tuple[int, ...]]:
    """[B, K, T, D] seen in groups, and the dimensions that share a scale."""
    B, K, T, D = numbers.shape
    if part.axis == "token":
        group = part.group or D
        missing = -D % group
        if missing:  # a short last group repeats its last number: neither its least nor its largest changes
            numbers = torch.cat([numbers, numbers[..., -1:].expand(B, K, T, missing)], -1)
        return numbers.view(B, K, T, -1, group), (4,)
    return numbers.reshape(B, K, T // part.group, part.group, D), (3,) if part.axis == "channel" else (1, 3, 4)


def _spread(scale: Tensor, part: Part, B: int, T: int) -> Tensor:
    """A stored scale [B, heads, entries, width] in the shape that broadcasts over `grouped`, float32."""
    if part.axis == "token":
        return scale.float()[..., None]  # [B, K, T, groups, 1]
    return scale.float()[..., None, :]  # [B, K or 1, T / group, 1, D or 1]


def encode(numbers: Tensor, part: Part) -> dict[str, Tensor]:
    """[B, K, T, D], T a whole number of blocks -> the tensors of `layout`, for these tokens."""
    B, K, T, D = numbers.shape
    groups, shared = grouped(numbers.float(), part)
    if part.code == "nvfp4":
        return _encode_nvfp4(groups, part, D)
    held = {}
    if part.zero_bits:
        if len(shared) == 1:
            low, high = groups.aminmax(dim=shared[0], keepdim=True)
        else:
            low, high = groups.amin(shared, keepdim=True), groups.amax(shared, keepdim=True)
        dtype = SCALES[part.zero_bits]
        minimum = low.to(dtype)
        minimum = torch.where(minimum.float() > low, (low - low.abs() * torch.finfo(dtype).eps).to(dtype), minimum)
        scale = ((high - minimum.float()) / ((1 << part.bits) - 1)).to(SCALES[part.scale_bits])
        codes = ((groups - minimum.float()) / scale.float().clamp(min=TINY)).round_().clamp_(0, (1 << part.bits) - 1)
        held["minimum"] = minimum
    else:
        reach = E4M3_MAX if part.code == "fp8" else (1 << (part.bits - 1)) - 1
        scale = (groups.abs().amax(shared, keepdim=True) / reach).clamp(min=TINY).to(SCALES[part.scale_bits])
        codes = (groups / scale.float()).clamp_(-reach, reach)
        codes = codes if part.code == "fp8" else codes.round_()
    held["scale"] = scale
    held = {name: t.flatten(-2) if part.axis == "token" else t.squeeze(-2) for name, t in held.items()}
    held["codes"] = _pack(codes.reshape(B, K, T, -1)[..., :D], part)
    return held


def _pack(codes: Tensor, part: Part) -> Tensor:
    if part.code == "fp8":
        return codes.to(torch.float8_e4m3fn).view(torch.uint8)  # clamped: the cast has nothing to saturate
    if part.bits == 8:
        return codes.to(torch.uint8) if part.zero_bits else codes.to(torch.int8).view(torch.uint8)
    codes = codes.to(torch.uint8) if part.zero_bits else codes.to(torch.int16)
    return pack(codes.flatten(0, -2), part.bits).view(*codes.shape[:-1], -1)


def _encode_nvfp4(groups: Tensor, part: Part, width: int) -> dict[str, Tensor]:
    B, K, T = groups.shape[:3]
    reach = groups.abs().amax(-1)  # [B, K, T, groups]
    by_block = reach.view(B, K, T // part.block, part.block, -1).amax((1, 3, 4))  # [B, blocks]
    block_scale = (by_block / (E4M3_MAX * E2M1_MAX)).clamp(min=TINY)[:, None, :, None]  # [B, 1, blocks, 1]
    each = block_scale.repeat_interleave(part.block, 2)  # [B, 1, T, 1]
    scale = reach / E2M1_MAX / each
    scale = to_e4m3(torch.where(reach > 0, scale.clamp(E4M3_SMALLEST, E4M3_MAX), 0.0))
    divisor = (scale.float() * each).clamp(min=TINY)[..., None]
    codes = encode_e2m1(groups / divisor).view(B, K, T, -1)[..., :width]
    return {"codes": pack(codes.flatten(0, -2), 4).view(B, K, T, -1), "scale": scale, "block_scale": block_scale}


def raw(held: dict[str, Tensor], part: Part, width: int, buffer: Tensor | None = None) -> Tensor:
    """The codes as numbers, without scale and minimum: float32 [B, K, T, D], in `buffer` where one is given."""
    packed = held["codes"]
    if part.bits == 8:
        if part.code == "fp8":
            packed = packed.view(torch.float8_e4m3fn)
        elif not part.zero_bits:
            packed = packed.view(torch.int8)
        return packed.float() if buffer is None else buffer[: packed.numel()].view(packed.shape).copy_(packed)
    codes = unpack(packed.reshape(-1, packed.shape[-1]), part.bits, width, signed=not part.zero_bits and part.code == "int")
    codes = decode_e2m1(codes) if part.code == "nvfp4" else codes.float()
    return codes.view(*packed.shape[:-1], width)


def decode(held: dict[str, Tensor], part: Part, width: int) -> Tensor:
    """The numbers that the packed tensors of some tokens stand for: float32 [B, K, T, D]."""
    codes = raw(held, part, width)
    B, K, T, D = codes.shape
    if T == 0:
        return codes
    if part.axis == "token" and part.group:
        codes = pad(codes, (0, -D % part.group))
    groups = codes.view(B, K, T, -1, part.group or D) if part.axis == "token" else codes.view(B, K, -1, part.group, D)
    scale = _spread(held["scale"], part, B, T)
    if part.code == "nvfp4":
        scale = scale * held["block_scale"].repeat_interleave(part.block, 2)[..., None]
    groups = groups * scale
    if part.zero_bits:
        groups = groups + _spread(held["minimum"], part, B, T)
    return groups.reshape(B, K, T, -1)[..., :D]
