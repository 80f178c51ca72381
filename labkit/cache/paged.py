"""The paged cache: rows are tables of blocks in a pool, so a row takes what it needs and rows may share what is equal.

    fork      a copy of rows costs a list of integers; the first write into a shared block copies that block alone
    rewind    gives whole blocks back        select   reorders tables        dropped   releases everything

    bytes held = blocks * bytes of a block; wasted are at most size - 1 slots a row, whatever the rows' lengths

Attention reads through the tables (`labkit.kernels.paged_kv`, on the CPU): each row costs its own length, not the
longest row's, and no dense copy exists. Where the kernel does not serve (long prefills, a GPU, other formats) one row at a
time is gathered; `dense` is the plain gather of all rows, for oracles and for looking. When it loses: rows of equal
length that share nothing, where a contiguous cache reads the same bytes without tables.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from labkit.cache.blocks import Blocks, Table
from labkit.cache.contract import KVCache
from labkit.cache.pages import BLOCK, PagePool
from labkit.cache.step import Step, attend_dense
from labkit.errors import BadRequest
from labkit.kernels.paged_kv import MOST_QUERIES, paged_attention
from labkit.plan.kv_formats import KVFormat
from labkit.plan.memory import KVShape

FIRST_SLOTS = 256  # of a row in a pool of its own


def _release_all(pool: Blocks, tables: list[Table]) -> None:
    for table in tables:
        pool.release(table)
    tables.clear()


class PagedCache(KVCache):
    """`pool`: a `PagePool` to share, else one of its own, which grows. `tables`: each row's blocks, oldest first."""

    def __init__(self, shape: KVShape, batch: int = 1, capacity: int | None = None, dtype: torch.dtype = torch.float32,
                 device: str | torch.device = "cpu", *, pool: PagePool | None = None, block: int = BLOCK,
                 kv_format: str | KVFormat | None = None):  # fmt: skip
        super().__init__(shape, batch, capacity, dtype, device)
        if pool is None:
            slots = FIRST_SLOTS if capacity is None else min(FIRST_SLOTS, capacity)
            pool = PagePool(shape, batch * -(-slots // block), block, dtype, device, kv_format, grows=True)
        elif (pool.shape, pool.dtype, pool.device) != (shape, dtype, self.device):
            raise BadRequest(
                f"The pool was made for another model, dtype or device ({pool.name} on {pool.device}); make one with the "
                "model's kv_shape, dtype and device."
            )
        self.pool = pool
        self.tables: list[Table] = [[] for _ in range(batch)]
        weakref.finalize(self, _release_all, pool, self.tables).atexit = False  # dropped: no block stays behind
        self._pass: dict = {}  # what the layers of one pass share

    @classmethod
    def over(cls, pool: PagePool, batch: int = 1, capacity: int | None = None) -> PagedCache:
        """An empty cache of `batch` rows in that pool."""
        return cls(pool.shape, batch, capacity, pool.dtype, pool.device, pool=pool)

    @classmethod
    def join(cls, caches: Iterable[PagedCache], capacity: int | None = None) -> PagedCache:
        """All rows of caches of one pool as the rows of one cache; the given ones stay as they are."""
        caches = list(caches)
        if not caches or any(cache.pool is not caches[0].pool for cache in caches):
            raise BadRequest(f"{len(caches)} caches to join: give at least one, all over the same pool.")
        joined = cls.over(caches[0].pool, sum(cache.batch for cache in caches), capacity)
        joined._take([table for cache in caches for table in cache.tables])
        joined.lengths = tuple(length for cache in caches for length in cache.lengths)
        return joined

    def fork(self, rows: Sequence[int] | None = None) -> PagedCache:
        """A cache of its own with the same contents (of those rows), sharing every block until somebody writes."""
        twin = PagedCache.join([self], self.capacity)
        if rows is not None:
            twin.select(rows)
        return twin

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if self.pool.home[layer] != layer:
            raise ValueError(f"Layer {layer} reads the cache of layer {self.pool.home[layer]}; it has nothing to append.")
        rows, tokens, blocks, slots = self._places()
        for side, new in enumerate((keys, values)[: len(self.pool.held[layer])]):
            one = self.step.full and self.step.num_tokens == 1
            self.pool.write(layer, side, blocks, slots, new[:, :, 0] if one else new[rows, :, tokens])  # [N, K, D]

    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        spec, step = self.shape.layers[layer], self.step
        if queries.shape[2] <= MOST_QUERIES and spec.latent_dim is None:
            held = self.pool.held[self.pool.home[layer]]
            out = paged_attention(queries, *held, self._tables_tensor(), step.starts, step.counts, scale=scale,
                                  window=spec.window, sinks=spec.sinks, memo=self._pass)  # fmt: skip
            if out is not None:
                return out
        width = spec.latent_dim or spec.head_dim
        out = queries.new_zeros(*queries.shape[:3], width)
        for row, count in enumerate(step.counts):  # gathered row by row: each as long as it is
            if count:
                keys, values = self._row(layer, row, queries.dtype)
                if ("step", row) not in self._pass:
                    self._pass["step", row] = Step(step.starts[row : row + 1], (count,), count, self.device)
                out[row, :, :count] = attend_dense(self._pass["step", row], queries[row : row + 1, :, :count], keys, values,
                                                   scale=scale, window=spec.window, sinks=spec.sinks)[0]  # fmt: skip
        return out

    def dense(self, layer: int) -> tuple[Tensor, Tensor]:
        """The plain gather: padded keys and values [B, K, S, D] of all rows, zeros behind each row's end."""
        rows = [self._row(layer, row, torch.float32 if self.pool.format else self.dtype) for row in range(self.batch)]
        pad = lambda t: torch.nn.functional.pad(t[0], (0, 0, 0, self.length - t.shape[2]))  # noqa: E731
        keys, values = (torch.stack([pad(row[side]) for row in rows]) for side in (0, 1))
        return keys, values

    @property
    def waste(self) -> float:
        """Share of the slots in the blocks held that hold no token."""
        used, allocated = self.pool.occupancy(self.tables, self.lengths)
        return 1 - used / allocated if allocated else 0.0

    def nbytes(self) -> int:
        """Bytes of the pool, which others may share."""
        return self.pool.nbytes()

    def nbytes_used(self) -> int:
        """Bytes of the tokens held; what rows share is counted once."""
        return self.pool.occupancy(self.tables, self.lengths)[0] * self.pool.block_bytes // self.pool.size

    def __repr__(self) -> str:
        blocks = len({block for table in self.tables for block in table})
        return f"PagedCache({self.batch} rows of {list(self.lengths)} tokens in {blocks} blocks, {self.waste:.1%} empty)"

    def _row(self, layer: int, row: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        spec, table = self.shape.layers[layer], torch.tensor(self.tables[row], dtype=torch.long, device=self.device)
        keys = self.pool.read(layer, 0, table, self.lengths[row])[None].to(dtype)  # [1, K, S, D]
        if spec.latent_dim is not None:
            return keys, keys[..., : spec.latent_dim]
        return keys, self.pool.read(layer, 1, table, self.lengths[row])[None].to(dtype)

    def _places(self) -> tuple[Tensor, ...]:
        """Row, token of this pass, block and slot of each of the N new tokens; worked out once a pass."""
        if "places" not in self._pass:
            size, step = self.pool.size, self.step
            places = [(row, token, self.tables[row][(start + token) // size], (start + token) % size)
                      for row, (start, count) in enumerate(zip(step.starts, step.counts)) for token in range(count)]
            self._pass["places"] = torch.tensor(places, device=self.device).unbind(1)
        return self._pass["places"]

    def _tables_tensor(self) -> Tensor:
        if "tables" not in self._pass:
            width = max(map(len, self.tables))
            self._pass["tables"] = torch.tensor([[*table, *[0] * (width - len(table))] for table in self.tables],
                                                dtype=torch.int32)  # fmt: skip
        return self._pass["tables"]

    def _reserve(self, lengths: tuple[int, ...], step: Step) -> None:
        plans = self.pool.growth(self.tables, step.starts, step.counts)
        fresh = iter(self.pool.allocate(sum(plan.fresh for plan in plans)) if plans else ())
        sources, targets = [], []
        for plan in plans:
            table, new = self.tables[plan.row], [next(fresh) for _ in range(plan.fresh)]
            if plan.copies_last:
                sources.append(table.pop())
                targets.append(new[0])
            table += new
        if sources:
            self.pool.copy(sources, targets)
            self.pool.release(sources)
        self._pass = {}

    def _rewind(self, lengths: tuple[int, ...]) -> None:
        for table, keep in zip(self.tables, lengths):
            blocks = -(-keep // self.pool.size)
            self.pool.release(table[blocks:])
            del table[blocks:]

    def _select(self, rows: tuple[int, ...]) -> None:
        self._take([self.tables[row] for row in rows])

    def _take(self, tables: Sequence[Table]) -> None:
        """Hold these blocks instead of those held now."""
        tables = [list(table) for table in tables]
        for table in tables:
            self.pool.share(table)
        _release_all(self.pool, self.tables)
        self.tables += tables
        self._pass = {}


def paged_cache(pool: PagePool | None = None, block: int = BLOCK, kv_format: str | KVFormat | None = None) -> Callable[..., PagedCache]:
    """A maker of paged caches for `make_cache` and `generate`: over that pool, or with blocks of that size and format."""

    def make(shape: KVShape, batch: int = 1, capacity: int | None = None, dtype=torch.float32, device="cpu"):
        return PagedCache(shape, batch, capacity, dtype, device, pool=pool, block=block, kv_format=kv_format)

    return make
