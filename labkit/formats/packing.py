"""Pack codes of 1 to 8 bits into bytes, as one little-endian bit stream per row.

Code i of a row takes bits i*bits to (i+1)*bits - 1, lowest bit first. A row ends on a
whole byte. The 4-bit codes 0, 1, 2, 3 become the bytes 10 32, the 2-bit codes 0..3 the
byte E4, and eight 3-bit codes three bytes. The tests pin this order, because a round
trip does not show a mistake that both directions share.

A word is the smallest number of whole bytes that whole codes fill. Cost: one pass over
a row for each code of a word.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from labkit.errors import BadRequest


def _word(bits: int) -> tuple[int, int, torch.dtype]:
    """Return the codes per word, its bytes and its dtype. No code crosses a word."""
    return (8 // bits, 1, torch.uint8) if 8 % bits == 0 else (8, bits, torch.int64)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack integer codes [R, K] into uint8 [R, ceil(K*bits/8)].

    Negative codes are stored in two's complement. Raises BadRequest if the codes are not integers of `bits` bits.
    """
    length, half = codes.shape[1], 1 << (bits - 1)
    if codes.is_floating_point():
        raise BadRequest(f"The codes are {codes.dtype}; round and clamp them to integers first.")
    low, high = (int(codes.min()), int(codes.max())) if codes.numel() else (0, 0)
    if low < -half or high >= (half if low < 0 else 2 * half):
        raise BadRequest(f"Codes from {low} to {high} do not fit {bits} bits; clamp them first.")
    count, size, dtype = _word(bits)
    codes = codes.to(torch.uint8) & (2 * half - 1)  # uint8 wraps modulo 256: two's complement
    codes = pad(codes, (0, -length % count)).unflatten(1, (-1, count)).to(dtype)
    words = codes[..., 0].clone()  # [R, words]
    for i in range(1, count):
        words |= codes[..., i] << (bits * i)
    octets = torch.stack([(words >> (8 * i)) & 255 for i in range(size)], -1)  # [R, words, size]
    return octets.flatten(1)[:, : math.ceil(length * bits / 8)].to(torch.uint8).contiguous()


def unpack(packed: Tensor, bits: int, length: int, signed: bool = False) -> Tensor:
    """Unpack uint8 [R, ceil(K*bits/8)] into codes [R, K], int8 if `signed`, else uint8.

    `length` is K. Raises BadRequest if rows of this length need another number of
    bytes.
    """
    width, half = math.ceil(length * bits / 8), 1 << (bits - 1)
    if packed.shape[1] != width:
        raise BadRequest(
            f"{length} codes of {bits} bits need {width} bytes per row, not {packed.shape[1]}."
        )
    if bits == 8:
        return packed.view(torch.int8) if signed else packed
    count, size, dtype = _word(bits)
    octets = pad(packed, (0, -width % size)).unflatten(1, (-1, size)).to(dtype)
    words = octets[..., 0].clone()  # [R, words]
    for i in range(1, size):
        words |= octets[..., i] << (8 * i)
    codes = torch.stack([(words >> (bits * i)) & (2 * half - 1) for i in range(count)], -1)
    codes = codes.flatten(1)[:, :length].to(torch.uint8)
    return (codes ^ half).to(torch.int8) - half if signed else codes  # nibble 8 -> -8
