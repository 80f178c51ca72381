"""Compute attention over packed blocks, decoding up to 2,048 tokens at a time.

    scores[t, s] = scale_s * (q_t . code_s) + minimum_s * sum(q_t)
    out[t]       = sum over s of (p[t, s] * scale_s) code_s + p[t, s] * minimum_s

These formulas apply to one scale per token. In other formats (a scale per channel or
per group, keys stored before RoPE) a block is decoded first. All sums are in float32,
because products of codes are large and cancel, and float16 would overflow.

Memory: up to MOST_SCORES scores (longer prompts are read in pieces), and one block of
keys or values. Cost compared with a dense cache: one conversion per code. Packed blocks
are faster if memory bandwidth is the bottleneck.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.cache.quantized.blocks import decode, folds, raw
from labkit.plan.kv_formats import Part

CHUNK = 2048  # tokens decoded at once
MOST_SCORES = 2**21  # 8 MiB


def cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [..., T, D/2] in float32 for integer positions [..., T].

    Positions may be negative.
    """
    # In float32, angles at position 100,000 would be wrong by 0.01.
    angles = positions[..., None].double() * frequencies.double()
    return angles.cos().float(), angles.sin().float()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [..., T, D] by cos and sin [..., T, D/2].

    Channels i and i + D/2 form a plane (RoPE, arXiv 2104.09864). Rotation angles add
    up, so negative positions undo RoPE.
    """
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@dataclass
class Side:
    """Keys or values of a layer: packed `slots`, then a dense `tail` [B, K, t, D]."""

    packed: dict[str, Tensor]
    part: Part
    slots: int
    tail: Tensor

    def blocks(self) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Yield the packed tensors, CHUNK tokens at a time."""
        step = max(CHUNK // self.part.block, 1) * self.part.block
        slots = self.packed["codes"].shape[2]
        per = {n: slots // t.shape[2] for n, t in self.packed.items()} if self.slots else {}
        for start in range(0, self.slots, step):
            stop = min(start + step, self.slots)
            parts = {n: t[:, :, start // per[n] : stop // per[n]] for n, t in self.packed.items()}
            yield slice(start, stop), parts

    def by_token(self, name: str) -> Tensor:
        """Return scales or minima, one per token: [B, K, 1, slots]."""
        return self.packed[name][:, :, : self.slots].float().mT


class Buffer:
    """Float32 memory for one block, reused by all layers and steps.

    Allocating new memory for every block would cost as much as the conversion.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0)

    def at_least(self, numbers: int, device: torch.device) -> Tensor:
        if self.memory.numel() < numbers:
            with torch.inference_mode(False):
                self.memory = torch.empty(numbers, device=device)
        return self.memory


def attend_packed(
    queries: Tensor,
    keys: Side,
    values: Side,
    seen: Tensor | None,
    scale: float | None,
    rotation: tuple[Tensor, Tensor] | None,
    buffer: Buffer,
) -> Tensor:
    """Compute attention [B, H, T, D] of queries over packed slots and tails.

    `seen` [B or 1, T, S] marks the keys that each query sees (None: all). `rotation` is
    cos and sin [B or 1, 1, slots, D/2] for keys that are stored before RoPE.
    """
    B, H, T, D = queries.shape
    K, slots, S = keys.tail.shape[1], keys.slots, keys.slots + keys.tail.shape[2]
    most = max(1, MOST_SCORES // (B * H * S))
    if T > most:
        pieces = zip(queries.split(most, 2), [None] * T if seen is None else seen.split(most, 1))
        rest = (scale, rotation, buffer)
        return torch.cat([attend_packed(q, keys, values, s, *rest) for q, s in pieces], 2)
    memory = buffer.at_least(B * K * min(slots, CHUNK) * D, queries.device)
    q = queries.reshape(B, K, H // K * T, D).float() * (D**-0.5 if scale is None else scale)
    p = torch.empty(*q.shape[:3], S, device=q.device)  # [B, K, G * T, S]

    fold = folds(keys.part) and rotation is None
    for at, block in keys.blocks():
        numbers = raw(block, keys.part, D, memory) if fold else decode(block, keys.part, D)
        if rotation is not None:
            numbers = rotate(numbers, *(t[:, :, at] for t in rotation))
        p[..., at] = q @ numbers.mT
    if fold and slots:
        p[..., :slots] *= keys.by_token("scale")
        if keys.part.zero_bits:
            p[..., :slots].addcmul_(q.sum(-1, keepdim=True), keys.by_token("minimum"))
    if slots < S:
        p[..., slots:] = q @ keys.tail.float().mT
    if seen is not None:  # with -inf, a row that sees no key would become NaN
        lowest = torch.finfo(torch.float32).min
        p = p.view(B, K, H // K, T, S).masked_fill(~seen[:, None, None], lowest).view(p.shape)
    p = p.softmax(-1)

    fold, out = folds(values.part), torch.zeros_like(q)  # [B, K, G * T, D]
    weights = p[..., :slots] * values.by_token("scale") if fold else p[..., :slots]
    for at, block in values.blocks():
        numbers = raw(block, values.part, D, memory) if fold else decode(block, values.part, D)
        out += weights[..., at] @ numbers
    if fold and values.part.zero_bits:
        out += (p[..., :slots] * values.by_token("minimum")).sum(-1, keepdim=True)
    if slots < S:
        out += p[..., slots:] @ values.tail.float()
    return out.view(B, H, T, D).to(queries.dtype)
