"""Which blocks are free and how many tables hold each of the others: a paged cache's bookkeeping, without a tensor.

A block is room for `size` tokens in every layer. A table is a list of blocks: token s of its sequence lies in block
table[s // size], slot s % size. A block may stand in several tables, which then share what lies in it; whoever wants to
write into a shared block takes a fresh one first and copies (copy-on-write), so no writer ever has a reader beside it.

    allocate(n)    n free blocks, each held once; refused before anything is changed where there are too few
    share(blocks)  one more holder each        release(blocks)  one fewer; gives back those that nobody holds any more

Always: free + owned == total, and every count equals the number of tables that hold the block. Costs: a few integers a
block, O(1) each; at most size - 1 slots of a table are empty. When it loses: blocks of one token save nothing more and
cost an integer a token, blocks of 256 waste like a contiguous reservation. Source: PagedAttention, arXiv 2309.06180.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit.errors import BadRequest, whole_number

Table = list[int]


class PoolFull(BadRequest):
    """The pool has too few free blocks; nothing has been changed."""


@dataclass(frozen=True)
class Growth:
    """What one row's table needs before `count` tokens can be written: fresh blocks, the first of them a copy or not."""

    row: int
    fresh: int
    copies_last: bool


class Blocks:
    """`total` blocks of `size` tokens; `grows`: more are added where they run out, as in a cache with a pool of its own."""

    def __init__(self, total: int, size: int = 16, grows: bool = False):
        for value, what in ((total, "The number of blocks in a pool"), (size, "The tokens in a block")):
            if whole_number(value, what) < 1:
                raise BadRequest(f"{what} is {value}; give at least 1.")
        self.size, self.grows = size, grows
        self.references = [0] * total
        self._free = list(range(total - 1, -1, -1))  # the lowest is taken first
        self.reclaim: Callable[[int], None] | None = None  # asked to free so many blocks that are held but not needed

    @property
    def total(self) -> int:
        return len(self.references)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def owned(self) -> int:
        return self.total - self.free

    def allocate(self, count: int) -> list[int]:
        if count > self.free and self.reclaim is not None:
            self.reclaim(count - self.free)
        if count > self.free and self.grows:
            first, more = self.total, max(count - self.free, self.total)
            self._grow(first + more)
            self.references += [0] * more
            self._free[:0] = range(first + more - 1, first - 1, -1)
        if count > self.free:
            raise PoolFull(
                f"The pool is full: {count} blocks of {self.size} tokens are needed and {self.free} of {self.total} are "
                "free; free or rewind a cache that shares the pool, or make a larger pool."
            )
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self.references[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        self._held(blocks)
        for block in blocks:
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> list[int]:
        self._held(blocks)
        freed = []
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                freed.append(block)
        self._free += reversed(freed)
        return freed

    def growth(self, tables: Sequence[Table], starts: Sequence[int], counts: Sequence[int]) -> list[Growth]:
        """What each row needs for `counts` tokens behind `starts`; rows that share a block leave it one after another."""
        plans, left = [], {}
        for row, (table, start, count) in enumerate(zip(tables, starts, counts)):
            if count == 0:
                continue
            fresh, copies = -(-(start + count) // self.size) - len(table), False
            if start % self.size:
                last = table[-1]
                holders = left.get(last, self.references[last])
                copies = holders > 1
                left[last] = holders - copies
            if fresh or copies:
                plans.append(Growth(row, fresh + copies, copies))
        return plans

    def occupancy(self, tables: Sequence[Table], lengths: Sequence[int]) -> tuple[int, int]:
        """Slots used and slots of the blocks held, by these tables together; a shared block counts once."""
        filled: dict[int, int] = {}
        for table, length in zip(tables, lengths):
            for index, block in enumerate(table):
                filled[block] = max(filled.get(block, 0), min(length - index * self.size, self.size))
        return sum(filled.values()), len(filled) * self.size

    def _held(self, blocks: Sequence[int]) -> None:
        for block, times in Counter(blocks).items():
            if not 0 <= block < self.total or self.references[block] < times:
                raise BadRequest(f"Block {block} is not held by anyone; a block is shared or released by its holders only.")

    def _grow(self, total: int) -> None:
        """Make room for the contents of `total` blocks, where there are contents."""
