"""Random operations on pages and the prefix store.

The operations are fork, append, rewind, free, evict, revoke, forget, expire and restart. The key of
a token contains its id, its position and the serial number of the request that computed it. So the
keys that a look-up returns show who computed them, when, and from which documents. Running rows are
also stored as lists. After every operation, reference counts are counted again from all tables.
"""

import shutil
import tempfile
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.cache.paged.blocks import PoolFull
from labkit.cache.paged.pool import PagePool
from labkit.cache.prefix.disk import DiskTier
from labkit.cache.prefix.entry import Fingerprint
from labkit.cache.prefix.store import PrefixStore
from labkit.plan.kv import KVShape

SHAPE, SIZE, BLOCKS = KVShape.uniform(1, 1, 4), 4, 24
MODELS = [Fingerprint("one"), Fingerprint("two")]
NAMES = (
    ["append"] * 4
    + ["request"] * 9
    + [
        "fork",
        "fork",
        "rewind",
        "rewind",
        "free",
        "free",
        "revoke",
        "forget tenant",
        "forget prefix",
        "expire",
        "restart",
        "sweep",
    ]
)
OPERATIONS = st.tuples(st.sampled_from(NAMES), st.integers(0, 2**32 - 1))


class World:
    """Pool, store, running rows, and the owner and documents of each request by serial number."""

    def __init__(self, on_disk):
        self.folder = tempfile.mkdtemp() if on_disk else None
        self.now, self.rows, self.done, self.asked = 1000.0, [], Counter(), {}
        self.totals = Counter()
        self.forbidden: set[tuple[int, int]] = (
            set()
        )  # (serial, position) that no look-up may return
        self.open()

    def open(self):
        self.pool = PagePool(SHAPE, BLOCKS, SIZE)
        disk = DiskTier(self.folder, 6000) if self.folder else None
        self.store = PrefixStore(
            self.pool, 10 * self.pool.block_bytes, ttl_s=50, clock=lambda: self.now, disk=disk
        )

    def restart(self):
        for cache, _ in self.rows:
            cache.rewind(0)
        self.rows.clear()
        self.totals.update(vars(self.store.counters))
        self.open()

    def close(self):
        self.restart()
        if self.folder:
            shutil.rmtree(self.folder)

    def append(self, cache, cells):
        """Append cells (token, serial) to `cache`; return False if the pool is full."""
        start = cache.length
        try:
            cache.advance(len(cells))
        except PoolFull:
            entries = [
                block
                for entry in self.store.entries()
                if entry.pages
                for block in entry.pages.tables[0]
            ]
            free = self.pool.free + sum(
                self.pool.references[b] == n for b, n in Counter(entries).items()
            )
            fresh = -(-(start + len(cells)) // SIZE) - len(cache.tables[0])
            copies = start % SIZE > 0 and self.pool.references[cache.tables[0][-1]] > 1
            assert free < fresh + copies and cache.lengths == (start,)
            return False
        keys = torch.tensor(
            [[token, serial, start + i, 1.0] for i, (token, serial) in enumerate(cells)]
        )[None, None]
        cache.append(0, keys, -keys)
        return True

    def check(self):
        tables = [cache.tables[0] for cache, _ in self.rows]
        tables += [entry.pages.tables[0] for entry in self.store.entries() if entry.pages]
        references = Counter(block for table in tables for block in table)
        assert self.pool.references == [references[block] for block in range(BLOCKS)]
        assert (
            self.pool.free + len(references) == BLOCKS
            and len(set(self.pool._free)) == self.pool.free
        )
        assert not set(self.pool._free) & set(references)
        free = self.pool._free
        assert not any(
            tensor[free].any() for tensor in self.pool.tensors()
        )  # free blocks contain no old data
        assert self.store.nbytes() <= 10 * self.pool.block_bytes
        if self.folder:
            disk = self.store.shelf.disk
            assert {p.name for p in disk.folder.iterdir()} == {
                e.file for e in self.store.entries() if e.file
            }
            assert disk.nbytes() <= 6000

    def contents(self):
        for cache, cells in self.rows:
            assert cells_of(cache) == cells


def cells_of(cache):
    if cache.length == 0:
        return []
    keys, values = cache.dense(0)
    assert torch.equal(keys, -values) and keys[0, 0, :, 2].tolist() == list(range(cache.length))
    return [(int(token), int(serial)) for token, serial in keys[0, 0, :, :2].tolist()]


def request(world, pick):
    """Look up, check the owners of the tokens found, compute the rest, and store all of them."""
    tenant, scope, model = "ab"[pick(0, 1)], "rw"[pick(0, 1)], MODELS[pick(0, 4) == 0]
    tokens = (
        [1 + pick(0, 1)] * 8 + [1 + pick(0, 1)] * 4 + [pick(1, 3) for _ in range(pick(1, 7))]
    )[pick(0, 3) :]
    view = world.store.open(tenant, scope, model)
    lease = view.lookup(tokens)
    found = cells_of(lease.cache)
    assert (
        len(found) == lease.length < len(tokens)
        and [token for token, _ in found] == tokens[: len(found)]
    )
    for position, (_, serial) in enumerate(found):
        owner, _ = world.asked[serial]
        assert owner == (tenant, scope, model) and (serial, position) not in world.forbidden
    built_on = {
        position: set(world.asked[serial][1][position])
        for position, (_, serial) in enumerate(found)
    }
    documents = {f"d{pick(0, 2)}": pick(0, len(tokens))} if pick(0, 2) == 0 else {}
    serial = len(world.asked) + 1
    before = set().union(*built_on.values(), set())
    for position in range(len(found), len(tokens)):
        before = before | {name for name, start in documents.items() if start <= position}
        built_on[position] = before
    world.asked[serial] = (tenant, scope, model), built_on
    cells = found + [(token, serial) for token in tokens[len(found) :]]
    if not world.append(lease.cache, cells[len(found) :]):
        lease.cache.rewind(0)
        return
    wait = pick(0, 5) == 0
    if wait:  # something is forgotten while this request runs
        forget(world, "revoke", pick)
    stored = view.keep(lease, lease.cache, 0, tokens, documents)
    assert stored == 0 if wait else stored == len(tokens) // SIZE * SIZE
    if stored:
        again = view.lookup([*tokens[:stored], 9])
        if (
            again.length != stored
        ):  # an entry that is only on disk is found only if it fits next to the rows
            there = [
                entry
                for entry in world.store.entries()
                if entry.tokens[:stored] == tuple(tokens[:stored])
            ]
            assert again.length == 0 and there and not any(entry.pages for entry in there)
            in_rows = {block for cache, _ in world.rows for block in cache.tables[0]} | set(
                lease.cache.tables[0]
            )
            assert BLOCKS - len(in_rows) < max(len(entry.tokens) for entry in there) // SIZE
        again.cache.rewind(0)
    world.rows.append((lease.cache, cells)) if len(world.rows) < 4 else lease.cache.rewind(0)


def forget(world, name, pick):
    """Tell the store to forget something, and forbid every cell that it covers."""
    if name == "revoke":
        document = f"d{pick(0, 2)}"
        hit = lambda owner, built_on, position: document in built_on[position]  # noqa: E731
        world.store.revoke(document)
    elif name == "forget tenant":
        tenant = "ab"[pick(0, 1)]
        hit = lambda owner, built_on, position: owner[0] == tenant  # noqa: E731
        world.store.forget(tenant=tenant)
    else:
        prefix = [1 + pick(0, 1)] * pick(1, 8)
        world.store.forget(prefix=prefix)
        assert all(list(entry.tokens[: len(prefix)]) != prefix for entry in world.store.entries())
        return
    for serial, (owner, built_on) in world.asked.items():
        world.forbidden |= {
            (serial, position) for position in built_on if hit(owner, built_on, position)
        }


def step(world, name, seed):
    generator = torch.Generator().manual_seed(seed)
    pick = lambda low, high: int(torch.randint(low, high + 1, (), generator=generator))  # noqa: E731
    world.done[name] += 1
    at = pick(0, len(world.rows) - 1) if world.rows else None
    if name == "request":
        request(world, pick)
    elif name in ("revoke", "forget tenant", "forget prefix"):
        forget(world, name, pick)
    elif name in ("expire", "sweep"):
        world.now += pick(0, 60) if name == "expire" else 0
        world.store.sweep()
        assert all(world.now - entry.created < 50 for entry in world.store.entries())
    elif name == "restart":
        world.restart()
    elif at is None:
        return
    else:
        cache, cells = world.rows[at]
        if name == "append":
            new = [(pick(1, 3), 0) for _ in range(pick(1, 6))]
            if world.append(cache, new):
                cells += new
        elif name == "fork" and len(world.rows) < 5:
            world.rows.append((cache.fork(), list(cells)))
        elif name == "rewind":
            keep = pick(0, len(cells))
            cache.rewind(keep)
            del cells[keep:]
        elif name == "free":
            cache.rewind(0)
            del world.rows[at]


def run(operations, on_disk):
    world = World(on_disk)
    try:
        for name, seed in operations:
            step(world, name, seed)
            world.check()
        world.contents()
    finally:
        world.close()
    return world


@pytest.mark.parametrize("on_disk", [False, True])
def test_random_operations_keep_all_invariants(on_disk):
    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(st.lists(OPERATIONS, min_size=30, max_size=60))
    def check(operations):
        run(operations, on_disk)

    check()


@pytest.mark.slow
def test_ten_thousand_random_operations_keep_all_invariants():
    done, store = Counter(), Counter()

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(st.lists(OPERATIONS, min_size=95, max_size=130), st.booleans())
    def check(operations, on_disk):
        world = run(operations, on_disk)
        done.update(world.done)
        store.update(world.totals)

    check()
    assert sum(done.values()) >= 10_000
    assert all(
        store[name] > 20
        for name in (
            "hits",
            "misses",
            "evictions",
            "spilled",
            "loaded",
            "expired",
            "forgotten",
            "stale",
        )
    ), store
