"""Cache keys and values in blocks of a pool, which rows may share.

Each row is a table of blocks.

    fork      copies lists of integers; the first write into a shared block copies it
    rewind    gives whole blocks back
    select    reorders tables

    bytes = blocks * bytes of a block; at most size - 1 slots per row are empty

On the CPU, attention reads through the tables
(`labkit.kernels.native.table_attention`). Each row costs its own length, not the
longest row's, and no dense copy exists. For calls that the kernel does not support
(long prefills, a GPU, other formats), `dense` gathers all rows.

When it loses: rows of equal length that share nothing. A contiguous cache reads the
same bytes without tables.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.cache.contract import KVCache
from labkit.cache.forward_pass import Step, attend_dense
from labkit.cache.paged.blocks import Blocks, Table
from labkit.cache.paged.pool import BLOCK, PagePool
from labkit.errors import BadRequest
from labkit.kernels.native.table_attention import MOST_QUERIES, Rows, table_attention
from labkit.plan.kv_formats import KVFormat


def _release_all(pool: Blocks, tables: list[Table]) -> None:
    for table in tables:
        pool.release(table)
    tables.clear()


class PagedCache(KVCache):
    """A cache over `pool`, or over its own pool, which grows.

    `block` (tokens per block) and `kv_format` are settings of its own pool. `tables`
    lists the blocks of each row, oldest first. The other arguments are those of
    KVCache.
    """

    def __init__(
        self,
        *sizes: Any,
        pool: PagePool | None = None,
        block: int = BLOCK,
        kv_format: str | KVFormat | None = None,
        **named: Any,
    ):
        super().__init__(*sizes, **named)
        mine = (self.shape, self.dtype, self.device)
        if pool is None:
            slots = min(self.first_slots, self.capacity or self.first_slots)
            blocks = self.batch * -(-slots // block)
            pool = PagePool(self.shape, blocks, block, *mine[1:], kv_format, grows=True)
        elif (pool.shape, pool.dtype, pool.device) != mine:
            raise BadRequest(
                f"The pool ({pool.name} on {pool.device}) was made for another model, dtype or "
                "device; make one with the model's kv_shape, dtype and device."
            )
        self.pool = pool
        self.tables: list[Table] = [[] for _ in range(self.batch)]
        # A cache that is no longer used gives its blocks back.
        weakref.finalize(self, _release_all, pool, self.tables).atexit = False

    @classmethod
    def over(cls, pool: PagePool, batch: int = 1, capacity: int | None = None) -> PagedCache:
        """Make an empty cache of `batch` rows in `pool`."""
        return cls(pool.shape, batch, capacity, pool.dtype, pool.device, pool=pool)

    @classmethod
    def join(cls, caches: Iterable[PagedCache], capacity: int | None = None) -> PagedCache:
        """Make one cache from the rows of several caches over the same pool.

        The given caches do not change. Raises BadRequest if their pools differ, or if
        there are none.
        """
        caches = list(caches)
        if not caches or any(cache.pool is not caches[0].pool for cache in caches):
            raise BadRequest(f"Cannot join {len(caches)} caches; give caches over the same pool.")
        joined = cls.over(caches[0].pool, sum(cache.batch for cache in caches), capacity)
        joined._take([table for cache in caches for table in cache.tables])
        joined.lengths = tuple(length for cache in caches for length in cache.lengths)
        return joined

    def fork(self, rows: Sequence[int] | None = None) -> PagedCache:
        """Make a cache of the same rows (or `rows` of them) that shares all blocks."""
        twin = PagedCache.join([self], self.capacity)
        if rows is not None:
            twin.select(rows)
        return twin

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.check_own(layer)
        rows, tokens, blocks, slots = self._places()
        one = self.step.full and self.step.num_tokens == 1
        for side, new in zip(range(len(self.pool.layers[layer])), (keys, values)):
            new = new[:, :, 0] if one else new[rows, :, tokens]  # [N, K, D]
            self.pool.write(layer, side, blocks, slots, new)

    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        spec, step = self.shape.layers[layer], self.step
        if queries.shape[2] <= MOST_QUERIES and spec.latent_dim is None:
            if "rows" not in self._pass:
                self._pass["rows"] = Rows(step.starts, step.counts, self._tables_tensor())
            sides, rows = self.pool.layers[self.shape.home[layer]], self._pass["rows"]
            bounds = (spec.window, spec.sinks)
            out = table_attention(queries, sides[0], sides[1], rows, scale, *bounds)
            if out is not None:
                return out
        keys, values = (side.to(queries.dtype) for side in self.dense(layer))
        return attend_dense(step, queries, keys, values, scale, spec)

    def dense(self, layer: int) -> tuple[Tensor, Tensor]:
        """Gather keys and values [B, K, S, D] of all rows, padded with zeros."""
        tables, sides = self._tables_tensor(), self.pool.layers[self.shape.home[layer]]
        dense = [self.pool.read(layer, i, tables, self.length) for i in range(len(sides))]
        if len(set(self.lengths)) > 1:  # a masked slot has weight 0, and 0 * NaN is NaN
            lengths = torch.tensor(self.lengths, device=self.device)[:, None, None, None]
            after = torch.arange(self.length, device=self.device)[:, None] >= lengths
            dense = [side.masked_fill_(after, 0) for side in dense]
        latent = self.shape.layers[layer].latent_dim
        return dense[0], (dense[1] if latent is None else dense[0][..., :latent])

    @property
    def waste(self) -> float:
        """The share of slots in this cache's blocks that have no token."""
        used, allocated = self.pool.occupancy(self.tables, self.lengths)
        return 1 - used / allocated if allocated else 0.0

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the pool, which other caches may share."""
        return self.pool.tensors()

    def nbytes_used(self) -> int:
        """Return the bytes of the cached tokens; shared blocks count once."""
        used, _ = self.pool.occupancy(self.tables, self.lengths)
        return used * self.pool.block_bytes // self.pool.size

    def _places(self) -> tuple[Tensor, ...]:
        """Return row, token of this pass, block and slot of new tokens: [N] each."""
        if "places" not in self._pass:
            rows, tokens, positions = self.step.scatter
            blocks = self._tables_tensor()[rows, positions // self.pool.size].long()
            self._pass["places"] = rows, tokens, blocks, positions % self.pool.size
        return self._pass["places"]

    def _tables_tensor(self) -> Tensor:
        """Return the tables as a tensor [B, n], padded with block 0."""
        if "tables" not in self._pass:
            width = max(map(len, self.tables))
            rows = [[*table, *[0] * (width - len(table))] for table in self.tables]
            self._pass["tables"] = torch.tensor(rows, dtype=torch.int32, device=self.device)
        return self._pass["tables"]

    def _cached_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        slot = torch.arange(self.length, device=self.device).expand(self.batch, -1)
        return self.dense(layer)[0].float(), slot

    def _reserve(self, lengths: tuple[int, ...], step: Step) -> None:
        self.pool.extend(self.tables, step.starts, step.counts)

    def _rewind(self, lengths: tuple[int, ...]) -> None:
        for table, keep in zip(self.tables, lengths):
            blocks = -(-keep // self.pool.size)
            self.pool.release(table[blocks:])
            del table[blocks:]

    def _select(self, rows: tuple[int, ...], order: Tensor) -> None:
        self._take([self.tables[row] for row in rows])

    def _take(self, tables: Sequence[Table]) -> None:
        """Replace this cache's tables by copies of the given ones."""
        copies = [list(table) for table in tables]
        for table in copies:
            self.pool.share(table)
        _release_all(self.pool, self.tables)
        self.tables += copies


def paged_cache(
    pool: PagePool | None = None, block: int = BLOCK, kv_format: str | KVFormat | None = None
) -> Callable[..., PagedCache]:
    """Return a function that makes paged caches, for `make_cache` and `generate`."""
    return partial(PagedCache, pool=pool, block=block, kv_format=kv_format)
