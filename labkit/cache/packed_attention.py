"""Attention that reads packed blocks: codes become numbers 512 tokens at a time, in one small float32 buffer.

    scores[t, s] = scale_s * (q_t . code_s) + minimum_s * sum(q_t)        where a token has one scale: folded in
    out[t]       = sum over s of (p[t, s] * scale_s) code_s + p[t, s] * minimum_s

Elsewhere (a scale per channel, per group, keys stored before RoPE) the block is decoded first. All sums are in float32,
whatever the dtype of queries: the products of codes are large and cancel, and a float16 would overflow.
Memory: scores of at most MOST_SCORES numbers (longer prompts are read in pieces), and one block of keys or values.
Cost against a dense cache: one conversion a code, repaid where memory is what one waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.cache.packed_blocks import decode, folds, raw
from labkit.cache.rotation import turn
from labkit.plan.kv_formats import Part

CHUNK = 512  # tokens decoded at once: 128 KiB a head of 64, which a core's own cache holds
MOST_SCORES = 2**21  # 8 MiB


@dataclass
class Side:
    """Keys, or values, of one layer as attention reads them: packed `slots`, then a dense `tail` [B, K, t, D]."""

    held: dict[str, Tensor]
    part: Part
    slots: int
    tail: Tensor

    def blocks(self) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        step = max(CHUNK // self.part.block, 1) * self.part.block
        codes = self.held["codes"].shape[2]
        per = {name: codes // t.shape[2] for name, t in self.held.items()} if codes else {}
        for start in range(0, self.slots, step):
            stop = min(start + step, self.slots)
            yield start, stop, {n: t[:, :, start // per[n] : stop // per[n]] for n, t in self.held.items()}


def attend_packed(queries: Tensor, keys: Side, values: Side, seen: Tensor | None, scale: float | None = None,
                  turns: tuple[Tensor, Tensor] | None = None) -> Tensor:  # fmt: skip
    """queries [B, H, T, D] -> [B, H, T, D]. `seen` [B or 1, T, S] over slots and tail, None: everything is seen.
    `turns`: cos and sin [B or 1, 1, slots, D/2] by which keys stored before RoPE are turned."""
    B, H, T, D = queries.shape
    K, S = keys.tail.shape[1], keys.slots + keys.tail.shape[2]
    most = max(1, MOST_SCORES // (B * H * S))
    if T > most:
        pieces = zip(queries.split(most, 2), [None] * T if seen is None else seen.split(most, 1))
        return torch.cat([attend_packed(q, keys, values, s, scale, turns) for q, s in pieces], 2)
    q = queries.reshape(B, K, H // K * T, D).float() * (D**-0.5 if scale is None else scale)
    p = torch.empty(*q.shape[:3], S, device=q.device)  # [B, K, G * T, S]
    total = q.sum(-1, keepdim=True) if folds(keys.part) else None
    for start, stop, held in keys.blocks():
        if total is not None and turns is None:
            block = (q @ raw(held, keys.part, D).mT).mul_(held["scale"].float().mT)  # scales [B, K, 1, s]
            if keys.part.zero_bits:
                block.addcmul_(total, held["minimum"].float().mT)
        else:
            numbers = decode(held, keys.part, D)
            if turns is not None:
                numbers = turn(numbers, *(t[:, :, start:stop] for t in turns))
            block = q @ numbers.mT
        p[..., start:stop] = block
    p[..., keys.slots :] = q @ keys.tail.float().mT
    if seen is not None:  # a padded row that sees nothing gets a mean of something instead of NaN
        lowest = torch.finfo(torch.float32).min
        p = p.view(B, K, H // K, T, S).masked_fill(~seen[:, None, None], lowest).view(p.shape)
    p = p.softmax(-1)
    out = p[..., values.slots :] @ values.tail.float()  # [B, K, G * T, D]
    for start, stop, held in values.blocks():
        weight = p[..., start:stop]
        if folds(values.part):
            out += (weight * held["scale"].float().mT) @ raw(held, values.part, D)
            if values.part.zero_bits:
                out += weight @ held["minimum"].float()
        else:
            out += weight @ decode(held, values.part, D)
    return out.view(B, H, T, D).to(queries.dtype)
