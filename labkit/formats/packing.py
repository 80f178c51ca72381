"""Codes as bytes: one little-endian bit stream a row, for any width from 1 to 8 bits.

Code i of a row takes bits i*bits .. (i+1)*bits - 1, the lowest bit first; a row ends on a whole byte. So 4-bit codes
0, 1, 2, 3 are the bytes 10 32 (first code in the low nibble), 2-bit codes 0..3 the one byte E4, and eight 3-bit codes
take three bytes with nothing wasted. This order is pinned in the tests: packing and unpacking with the same mistake
gives every round trip back and no file that anyone else can read.

Cost: 8 codes and `bits` bytes at a time, shifted in int64 lanes; plain, and no kernel.
"""

import math

import torch
from torch import Tensor

from labkit.errors import BadRequest


def pack(codes: Tensor, bits: int) -> Tensor:
    """Integer codes [R, K] (signed ones as two's complement) -> uint8 [R, ceil(K*bits/8)]."""
    length = codes.shape[1]
    if codes.is_floating_point():
        raise BadRequest(f"Packing takes integer codes and got {codes.dtype}; round and clamp before packing.")
    lowest, highest = (int(codes.min()), int(codes.max())) if codes.numel() else (0, 0)
    if highest >= 1 << bits or lowest < -(1 << (bits - 1)) or (lowest < 0 and highest >= 1 << (bits - 1)):
        raise BadRequest(f"Codes from {lowest} to {highest} do not fit {bits} bits; clamp them first.")
    codes = codes.to(torch.uint8) & ((1 << bits) - 1)  # uint8 wraps modulo 256: two's complement
    if bits == 8:
        return codes.contiguous()
    if bits in (2, 4):  # codes do not straddle bytes
        per_byte = 8 // bits
        codes = torch.nn.functional.pad(codes, (0, -length % per_byte)).unflatten(1, (-1, per_byte))  # [R, bytes, codes]
        packed = codes[..., 0].clone()
        for position in range(1, per_byte):
            packed |= codes[..., position] << (bits * position)
        return packed
    codes = torch.nn.functional.pad(codes, (0, -length % 8)).unflatten(1, (-1, 8)).to(torch.int64)  # [R, words, 8]
    word = torch.zeros(codes.shape[:-1], dtype=torch.int64, device=codes.device)
    for position in range(8):
        word |= codes[..., position] << (bits * position)
    octets = torch.stack([(word >> (8 * byte)) & 255 for byte in range(bits)], -1)  # [R, words, bits]
    return octets.flatten(1)[:, : math.ceil(length * bits / 8)].to(torch.uint8)


def unpack(packed: Tensor, bits: int, length: int, signed: bool = False) -> Tensor:
    """uint8 [R, ceil(K*bits/8)] -> codes [R, K]: uint8, or int8 when `signed`."""
    if packed.shape[1] != math.ceil(length * bits / 8):
        raise BadRequest(
            f"{length} codes of {bits} bits are {math.ceil(length * bits / 8)} bytes a row, but the rows have {packed.shape[1]}."
        )
    if bits == 8:
        codes = packed
    elif bits in (2, 4):
        shifts = range(0, 8, bits)
        codes = torch.stack([(packed >> shift) & ((1 << bits) - 1) for shift in shifts], -1).flatten(1)[:, :length]
    else:
        octets = torch.nn.functional.pad(packed, (0, -packed.shape[1] % bits)).unflatten(1, (-1, bits)).to(torch.int64)
        word = sum(octets[..., byte] << (8 * byte) for byte in range(bits))  # [R, words]
        codes = torch.stack([(word >> (bits * i)) & ((1 << bits) - 1) for i in range(8)], -1)
        codes = codes.flatten(1)[:, :length].to(torch.uint8)
    if not signed:
        return codes
    if bits == 8:
        return codes.view(torch.int8)
    sign = 1 << (bits - 1)
    return ((codes ^ sign).to(torch.int8)) - sign  # nibble 8 -> -8
