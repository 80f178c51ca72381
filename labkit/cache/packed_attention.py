"""Attention that reads packed blocks: codes become numbers one block of 2,048 tokens at a time, in one buffer.

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
from labkit.kernels.packed_kv import int8_scores, int8_sums
from labkit.plan.kv_formats import Part

CHUNK = 2048  # tokens decoded at once
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

    def by_kernel(self) -> bool:
        """Whether it is what the kernel reads: whole bytes, and a bfloat16 scale and minimum a token."""
        return self.part.bits == 8 and self.part.code == "int" and self.part.zero_bits == self.part.scale_bits == 16

    def held_int8(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.held["codes"], self.held["scale"], self.held["minimum"]

    def by_token(self, name: str) -> Tensor | None:
        """Scales or minima of one a token, as a row beside the scores: float32 [B, K, 1, slots]."""
        return self.held[name][:, :, : self.slots].float().mT if name in self.held else None


class Buffer:
    """Float32 memory for one block, kept from layer to layer and from step to step: fresh memory would have to be
    mapped anew each time, which costs as much as the conversion."""

    def __init__(self):
        self.memory = torch.empty(0)

    def at_least(self, numbers: int, device: torch.device) -> Tensor:
        if self.memory.numel() < numbers:
            with torch.inference_mode(False):
                self.memory = torch.empty(numbers, device=device)
        return self.memory


def attend_packed(queries: Tensor, keys: Side, values: Side, seen: Tensor | None, scale: float | None = None,
                  turns: tuple[Tensor, Tensor] | None = None, buffer: Buffer | None = None) -> Tensor:  # fmt: skip
    """queries [B, H, T, D] -> [B, H, T, D]. `seen` [B or 1, T, S] over slots and tail, None: everything is seen.
    `turns`: cos and sin [B or 1, 1, slots, D/2] by which keys stored before RoPE are turned."""
    B, H, T, D = queries.shape
    K, slots, S = keys.tail.shape[1], keys.slots, keys.slots + keys.tail.shape[2]
    most = max(1, MOST_SCORES // (B * H * S))
    if T > most:
        pieces = zip(queries.split(most, 2), [None] * T if seen is None else seen.split(most, 1))
        return torch.cat([attend_packed(q, keys, values, s, scale, turns, buffer) for q, s in pieces], 2)
    memory = (buffer or Buffer()).at_least(B * K * min(slots, CHUNK) * D, queries.device)
    q = queries.reshape(B, K, H // K * T, D).float() * (D**-0.5 if scale is None else scale)
    p = torch.empty(*q.shape[:3], S, device=q.device)  # [B, K, G * T, S]

    fold = folds(keys.part) and turns is None
    native = fold and slots > 0 and keys.by_kernel() and int8_scores(q, *keys.held_int8(), p, slots)
    for start, stop, held in () if native else keys.blocks():
        numbers = raw(held, keys.part, D, memory) if fold else decode(held, keys.part, D)
        if turns is not None:
            numbers = turn(numbers, *(t[:, :, start:stop] for t in turns))
        p[..., start:stop] = q @ numbers.mT
    if fold and slots and not native:
        p[..., :slots] *= keys.by_token("scale")
        if keys.part.zero_bits:
            p[..., :slots].addcmul_(q.sum(-1, keepdim=True), keys.by_token("minimum"))
    if slots < S:
        p[..., slots:] = q @ keys.tail.float().mT
    if seen is not None:  # a padded row that sees nothing gets a mean of something instead of NaN
        lowest = torch.finfo(torch.float32).min
        p = p.view(B, K, H // K, T, S).masked_fill(~seen[:, None, None], lowest).view(p.shape)
    p = p.softmax(-1)

    fold = folds(values.part)
    out = int8_sums(p, *values.held_int8(), slots) if fold and slots and values.by_kernel() else None
    if out is None:
        out = torch.zeros_like(q)  # [B, K, G * T, D]
        weights = p[..., :slots] * values.by_token("scale") if fold else p[..., :slots]
        for start, stop, held in values.blocks():
            numbers = raw(held, values.part, D, memory) if fold else decode(held, values.part, D)
            out += weights[..., start:stop] @ numbers
        if fold and values.part.zero_bits:
            out += (p[..., :slots] * values.by_token("minimum")).sum(-1, keepdim=True)
    if slots < S:
        out += p[..., slots:] @ values.tail.float()
    return out.view(B, H, T, D).to(queries.dtype)
