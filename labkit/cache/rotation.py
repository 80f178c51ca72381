"""Turning keys that are already rotated: back to before RoPE, or on to another position.

Channels i and i + D/2 of a head form a plane, turned by `position * frequency_i` (Su et al. 2021). Turning is undone by
the negative angle, and turns add up: a key of position p, turned by d more positions, is the key of position p + d. So a
cache needs no unrotated copy to move a key or to quantise it as it was; it needs the frequencies, which the model hands
in. Cost: cos and sin of [tokens, D/2], and four products a pair of channels. It cannot serve a model whose frequencies
change with the length (dynamic NTK), because then a key does not know by which it was turned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.errors import BadRequest
from labkit.plan.memory import KVShape


def check_frequencies(frequencies: object, shape: KVShape) -> None:
    """Refuse what cannot turn the keys of every layer, before one is stored."""
    halves = sorted({layer.head_dim / 2 for layer in shape.layers})
    size = tuple(frequencies.shape) if isinstance(frequencies, Tensor) else None
    if size is None or [(half,) for half in halves] != [size]:
        raise BadRequest(f"Keys of {', '.join(f'{2 * half:g}' for half in halves)} channels are turned by a tensor of half as "
                         f"many frequencies, not by {frequencies if size is None else f'{size}'}; give the model's own.")


def cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [..., T, D/2] of positions [..., T] (whole, may be negative), in float32."""
    angles = positions[..., None].double() * frequencies.double()  # float32 angles of 100,000 positions are off by 0.01
    return angles.cos().float(), angles.sin().float()


def turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [..., T, D] turned by cos, sin [..., T, D/2] (broadcast over heads)."""
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
