"""Which tokens of a row are packed, and where: bookkeeping in plain numbers, without a tensor of the cache.

A row is packed slots and then a tail. Tokens are packed in whole blocks, the oldest first, when the tail would hold more
than its size. Going back into the bulk leaves a block that holds fewer tokens than it has slots ("short"): what is
packed is never decoded and packed again, so nothing drifts. Slots are therefore not positions; `positions` says which is
which. A short block wastes its empty slots until it is cut away, at most block - 1 of them for each time a rewind went
into the bulk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

NOWHERE = 2**62  # the position of a slot that holds nothing: no query sees it


@dataclass
class Bulk:
    """The packed part of one row: `slots` in use, a multiple of the block; `short`: block index -> tokens in it."""

    block: int
    slots: int = 0
    short: dict[int, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.slots - sum(self.block - held for held in self.short.values())

    def copy(self) -> Bulk:
        return Bulk(self.block, self.slots, dict(self.short))

    def cut(self, keep: int) -> None:
        """Forget all packed tokens but the first `keep`."""
        tokens = self.tokens
        while tokens > keep:
            last = self.slots // self.block - 1
            held = self.short.pop(last, self.block)
            if tokens - held >= keep:
                self.slots, tokens = self.slots - self.block, tokens - held
            else:
                self.short[last], tokens = held - (tokens - keep), keep

    def positions(self, slots: int) -> Tensor:
        """The position of each of `slots` slots [slots]."""
        found = torch.full((slots,), NOWHERE)
        found[: self.slots] = torch.arange(self.slots)
        for index, held in self.short.items():
            end = (index + 1) * self.block
            found[end - self.block + held : end] = NOWHERE
            found[end : self.slots] -= self.block - held
        return found


@dataclass(frozen=True)
class Move:
    """What one pass does to a row: of `held` tokens in its tail and `count` new ones, the oldest `pack` are packed."""

    start: int  # position of the first token in the tail
    held: int
    count: int
    pack: int
    slot: int  # where packed tokens go

    @property
    def left(self) -> int:
        return self.held + self.count - self.pack


def plan(bulk: Bulk, length: int, count: int, tail: int) -> Move:
    """The move of a row of `length` tokens that gets `count` more: as few blocks as leave at most `tail`."""
    start = bulk.tokens
    held = length - start
    blocks = -(-max(0, held + count - tail) // bulk.block)
    return Move(start, held, count, blocks * bulk.block, bulk.slots)
