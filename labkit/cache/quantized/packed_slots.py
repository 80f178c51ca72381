"""Track which tokens of a row are packed and in which slots, without tensors.

A row consists of packed slots followed by a tail. When the tail would exceed its size,
the oldest tokens are packed in whole blocks. A rewind into the packed part leaves a
"short" block, with fewer tokens than slots. Its tokens are not decoded and packed
again, so errors do not accumulate. Slot numbers then differ from positions, and
`Bulk.positions` maps them. A short block wastes at most block - 1 slots until it is
removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from labkit.cache.forward_pass import NOWHERE


@dataclass
class Bulk:
    """The packed part of a row.

    `slots` are in use, a multiple of `block`. `short` maps the index of each short
    block to its number of tokens.
    """

    block: int
    slots: int = 0
    short: dict[int, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.slots - sum(self.block - tokens for tokens in self.short.values())

    def cut(self, keep: int) -> None:
        """Drop all packed tokens except the first `keep`."""
        tokens = self.tokens
        while tokens > keep:
            last = self.slots // self.block - 1
            tokens -= self.short.pop(last, self.block)
            if tokens >= keep:
                self.slots -= self.block
            else:
                self.short[last] = keep - tokens

    def positions(self, slots: int) -> Tensor:
        """Return the position of each of `slots` slots: [slots]."""
        positions = torch.full((slots,), NOWHERE)
        positions[: self.slots] = torch.arange(self.slots)
        for index, tokens in self.short.items():
            end = (index + 1) * self.block
            positions[end - self.block + tokens : end] = NOWHERE
            positions[end : self.slots] -= self.block - tokens
        return positions


@dataclass(frozen=True)
class Move:
    """How a pass changes a row: it packs the oldest tokens and keeps the rest."""

    start: int  # position of the first token in the tail
    tail: int  # tokens in the tail before the pass
    count: int  # new tokens
    pack: int  # tokens to pack
    slot: int  # the first slot for them

    @property
    def left(self) -> int:
        return self.tail + self.count - self.pack


def plan(bulk: Bulk, length: int, count: int, most: int) -> Move:
    """Plan `count` more tokens for a row of `length`; up to `most` stay in the tail."""
    start = bulk.tokens
    tail = length - start
    blocks = -(-max(0, tail + count - most) // bulk.block)
    return Move(start, tail, count, blocks * bulk.block, bulk.slots)
