"""Where entries lie: in memory within a budget, then on disk within another; the least recently used go first.

    memory full   the entry goes to disk (written once), or is dropped where there is no disk
    pool full     entries make room for running requests, if that is enough; else nothing is evicted
    disk full     the oldest files are deleted

Bytes are those of the distinct blocks: prefixes that share their beginning share its blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from labkit.cache.pages import PagePool
from labkit.cache.prefix_disk import DiskTier
from labkit.cache.prefix_entry import Counters, Entry
from labkit.cache.prefix_identity import Identity
from labkit.cache.prefix_spill import about, fill, found_on_disk, layout, tensors_of
from labkit.errors import BadRequest


class Shelf:
    """Entries by identity. Takes over what an earlier process left on `disk`, and the pool's last resort."""

    def __init__(self, pool: PagePool, budget_bytes: int, disk: DiskTier | None = None):
        if budget_bytes < pool.block_bytes:
            raise BadRequest(f"A budget of {budget_bytes} bytes holds nothing; give at least a block, {pool.block_bytes} bytes.")
        if pool.reclaim is not None:
            raise BadRequest("The pool has a prefix store already; use that one, or make another pool.")
        found = list(found_on_disk(disk)) if disk is not None else []  # refuses before the pool is touched
        self.pool, self.budget_bytes, self.disk = pool, budget_bytes, disk
        self.counters, self.layout, self._ticks = Counters(), layout(pool), 0
        self._entries: dict[Identity, list[Entry]] = {}
        for entry in found:
            self._entries.setdefault(entry.identity, []).append(entry)
        pool.wipe, pool.reclaim = True, self._make_room
        if disk is not None:
            self._fit_disk()

    def all(self) -> list[Entry]:
        return [entry for entries in self._entries.values() for entry in entries]

    def of(self, identity: Identity) -> list[Entry]:
        """Entries of that identity which this pool can read."""
        return [entry for entry in self._entries.get(identity, ()) if entry.layout == self.layout]

    def nbytes(self) -> int:
        return len(self._holders()) * self.pool.block_bytes

    def add(self, entry: Entry) -> bool:
        """Whether it fits into the budget and was added."""
        if len(entry.pages.tables[0]) * self.pool.block_bytes > self.budget_bytes:
            self.counters.too_large += 1
            entry.pages.rewind(0)
            return False
        self._entries.setdefault(entry.identity, []).append(entry)
        self.counters.stored += 1
        self.touch(entry)
        return True

    def touch(self, entry: Entry) -> None:
        """It was used: now others go before it."""
        self._ticks += 1
        entry.used = self._ticks
        self._fit()

    def load(self, entry: Entry) -> None:
        """Bring an entry from disk into the pool; raises PoolFull or Refused."""
        entry.pages = fill(self.disk, entry, self.pool)
        self.counters.loaded += 1

    def drop(self, entries: Sequence[Entry]) -> int:
        """Off the shelf: first out of reach, all of them, then off the disk."""
        for entry in entries:
            self._entries[entry.identity].remove(entry)
            if not self._entries[entry.identity]:
                del self._entries[entry.identity]
            if entry.pages is not None:
                entry.pages.rewind(0)
        failed = 0
        for entry in entries:
            try:
                self.delete_file(entry)
            except OSError:
                failed += 1
        if failed:
            raise BadRequest(f"{failed} files of dropped prefixes could not be deleted; delete them in their folder by hand.")
        return len(entries)

    def delete_file(self, entry: Entry) -> None:
        if entry.file is not None:
            self.disk.delete(entry.file)
            entry.file = None

    def _holders(self) -> Counter:
        """Block -> how many entries hold it."""
        return Counter(block for entry in self.all() if entry.pages for block in entry.pages.tables[0])

    def _fit(self) -> None:
        while self.nbytes() > self.budget_bytes:
            self._evict()

    def _fit_disk(self) -> None:
        while self.disk.budget_bytes is not None and self.disk.nbytes() > self.disk.budget_bytes:
            oldest = min((entry for entry in self.all() if entry.file), key=lambda entry: entry.used)
            self.delete_file(oldest)
            if oldest.pages is None:
                self.drop([oldest])

    def _make_room(self, missing: int) -> None:
        only_here = sum(self.pool.references[block] == times for block, times in self._holders().items())
        wanted = self.pool.free + missing
        while missing <= only_here and self.pool.free < wanted:
            self._evict()

    def _evict(self) -> None:
        oldest = min((entry for entry in self.all() if entry.pages), key=lambda entry: entry.used)
        self.counters.evictions += 1
        if self.disk is not None and oldest.file is None:
            try:
                oldest.file = self.disk.write(about(oldest), tensors_of(oldest))
                self.counters.spilled += 1
                self._fit_disk()  # which may take the very file
            except OSError:  # a full disk costs a prefix, not a request
                self.counters.lost += 1
        if oldest.file is None:
            self.drop([oldest])
        else:
            oldest.pages.rewind(0)
            oldest.pages = None
