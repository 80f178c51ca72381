"""Track the free blocks, reference counts and tables of a paged cache; no tensors.

A block is room for `size` tokens in every layer. A table is a list of blocks: token s
of its sequence is in block table[s // size], slot s % size. Several tables may share a
block. Before a table writes into a shared block, it takes a free block and copies the
content (copy-on-write).

Invariants: free + owned == total, and each reference count is the number of tables that
contain the block. Cost: a few integers per block, O(1) per operation. A table has at
most size - 1 empty slots.

When it loses: blocks of 1 token cost one integer per token and save little more. Blocks
of 256 tokens waste as much memory as a contiguous reservation. Source: PagedAttention,
arXiv 2309.06180.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from labkit.errors import BadRequest, whole_number

Table = list[int]


class PoolFull(BadRequest):
    """The pool has too few free blocks; nothing has been changed."""


class Blocks:
    """`total` blocks of `size` tokens each.

    With `grows`, more blocks are added when they run out.
    """

    def __init__(self, total: int, size: int = 16, grows: bool = False):
        total = whole_number(total, "The number of blocks in a pool", 1)
        self.size = whole_number(size, "The number of tokens in a block", 1)
        self.grows = grows
        self.references = [0] * total
        self._free = list(range(total))[::-1]  # the lowest is taken first
        self.reclaim: Callable[[int], None] | None = None  # called if blocks run out

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
        """Take `count` free blocks. Raises PoolFull before anything is changed."""
        if count > self.free and self.reclaim is not None:
            self.reclaim(count - self.free)
        if count > self.free and self.grows:
            self._add(max(count - self.free, self.total))
        if count > self.free:
            raise PoolFull(
                f"The pool is full: {count} blocks are needed and {self.free} of {self.total} are "
                "free; rewind a cache of this pool, or make a larger pool."
            )
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self.references[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        self._check_in_use(blocks)
        for block in blocks:
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Remove a reference from each block; return the blocks that are free now."""
        self._check_in_use(blocks)
        freed = []
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                freed.append(block)
        self._free += reversed(freed)
        return freed

    def extend(
        self, tables: Sequence[Table], starts: Sequence[int], counts: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Give each table the blocks that `counts` tokens after `starts` need.

        Returns (source, target) of the blocks that were copied. Each table that shares
        a block gets a copy, except the last one, which keeps the original. Raises
        PoolFull and changes nothing if too few blocks are free.
        """
        needs: list[tuple[Table, int, bool]] = []
        leaving: Counter[int] = Counter()  # block -> tables that replace it by a copy
        for table, start, count in zip(tables, starts, counts):
            copied, fresh = False, -(-(start + count) // self.size) - len(table)
            if count and start % self.size:  # the first new token goes into the last block
                copied = self.references[table[-1]] - leaving[table[-1]] > 1
                leaving[table[-1]] += copied
            needs.append((table, fresh + copied, copied))
        blocks = iter(self.allocate(sum(fresh for _, fresh, _ in needs)))
        copies = []
        for table, fresh, copied in needs:
            new = [next(blocks) for _ in range(fresh)]
            if copied:
                copies.append((table.pop(), new[0]))
            table += new
        self.copy(copies)
        self.release([source for source, _ in copies])
        return copies

    def occupancy(self, tables: Sequence[Table], lengths: Sequence[int]) -> tuple[int, int]:
        """Return (slots in use, slots in all blocks) of these tables.

        A shared block counts once.
        """
        filled: dict[int, int] = {}
        for table, length in zip(tables, lengths):
            for index, block in enumerate(table):
                used = min(length - index * self.size, self.size)
                filled[block] = max(filled.get(block, 0), used)
        return sum(filled.values()), len(filled) * self.size

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy the content of blocks (source, target).

        A pool with content overrides this.
        """

    def _add(self, more: int) -> None:
        """Add `more` free blocks."""
        first = self.total
        self.references += [0] * more
        self._free[:0] = range(first + more - 1, first - 1, -1)

    def _check_in_use(self, blocks: Sequence[int]) -> None:
        for block, times in Counter(blocks).items():
            if not 0 <= block < self.total or self.references[block] < times:
                raise BadRequest(f"Block {block} is not in use; give the blocks of a table.")
