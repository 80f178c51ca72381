"""Store entries in memory and on disk, each within a budget.

The least recently used entries are removed first.

    memory full   the entry goes to disk (written once), or is dropped without a disk
    pool full     entries make room for running requests, but only if that is enough
    disk full     the oldest files are deleted

A block that several prefixes share counts once. `counters` counts these events:

    hits, misses, tokens_found        of look-ups
    evictions, spilled, loaded        from memory, to disk, from disk
    expired, forgotten                entries that were dropped by age or by request
    stale                             results that began before something was forgotten
    lost                              evicted when the disk could not take them
    untrusted                         files that were changed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

from labkit.cache.paged.pool import PagePool
from labkit.cache.prefix.disk import DiskTier, about, layout, tensors_of
from labkit.cache.prefix.entry import Entry, Identity
from labkit.errors import BadRequest

EVENTS = "hits misses tokens_found evictions spilled loaded expired forgotten stale lost untrusted"


class Shelf:
    """Entries by identity, including those that an earlier process left on `disk`.

    A full pool calls it to free blocks.
    """

    def __init__(self, pool: PagePool, budget_bytes: int, disk: DiskTier | None = None):
        if budget_bytes < pool.block_bytes:
            raise BadRequest(
                f"The budget is {budget_bytes} bytes; give at least {pool.block_bytes}, one block."
            )
        if pool.reclaim is not None:
            raise BadRequest("The pool already has a prefix store; use it, or make another pool.")
        self.pool, self.budget_bytes = pool, budget_bytes
        self.disk: DiskTier = disk  # type: ignore[assignment]
        self.counters = SimpleNamespace(**dict.fromkeys(EVENTS.split(), 0))
        self.layout, self._ticks = layout(pool), 0
        # Reading the disk may raise, so the pool is changed afterwards.
        self.entries: list[Entry] = [] if disk is None else list(disk.entries())
        pool.wipe, pool.reclaim = True, self._make_room
        self._fit_disk()

    def of(self, identity: Identity) -> list[Entry]:
        """Return the entries of an identity that this pool can read."""
        return [e for e in self.entries if e.identity == identity and e.layout == self.layout]

    def nbytes(self) -> int:
        return len(self._users()) * self.pool.block_bytes

    def add(self, entry: Entry) -> bool:
        """Add an entry; return whether it fits into the budget."""
        if len(entry.pages.tables[0]) * self.pool.block_bytes > self.budget_bytes:
            entry.pages.rewind(0)
            return False
        self.entries.append(entry)
        self.touch(entry)
        return True

    def touch(self, entry: Entry) -> None:
        """Record that an entry was used, so others are evicted before it."""
        self._ticks += 1
        entry.used = self._ticks
        while self.nbytes() > self.budget_bytes:
            self._evict()

    def drop(self, entries: Sequence[Entry]) -> int:
        """Remove entries from the list, then delete their files; return how many."""
        for entry in entries:
            self.entries.remove(entry)
            if entry.pages is not None:
                entry.pages.rewind(0)
        failed = 0
        for entry in entries:
            try:
                self.delete_file(entry)
            except OSError:
                failed += 1
        if failed:
            raise BadRequest(f"{failed} prefix files could not be deleted; delete them by hand.")
        return len(entries)

    def delete_file(self, entry: Entry) -> None:
        if entry.file is not None:
            self.disk.delete(entry.file)
            entry.file = None  # type: ignore[assignment]

    def _users(self) -> Counter[int]:
        """Return the number of entries that use each block."""
        return Counter(block for e in self.entries if e.pages for block in e.pages.tables[0])

    def _fit_disk(self) -> None:
        budget = None if self.disk is None else self.disk.budget_bytes
        while budget is not None and self.disk.nbytes() > budget:
            oldest = min((e for e in self.entries if e.file), key=lambda entry: entry.used)
            self.delete_file(oldest)
            if oldest.pages is None:
                self.drop([oldest])

    def _make_room(self, missing: int) -> None:
        """Free `missing` blocks of the pool, if evictions are enough for that."""
        references = self.pool.references
        only_here = sum(references[block] == times for block, times in self._users().items())
        goal = self.pool.free + missing
        while missing <= only_here and self.pool.free < goal:
            self._evict()

    def _evict(self) -> None:
        """Move the least recently used entry to disk, or drop it."""
        oldest = min((e for e in self.entries if e.pages), key=lambda entry: entry.used)
        self.counters.evictions += 1
        if self.disk is not None and oldest.file is None:
            try:
                oldest.file = self.disk.write(about(oldest), tensors_of(oldest))
                self.counters.spilled += 1
                self._fit_disk()  # this may delete the new file
            except OSError:  # the disk is full: the prefix is lost, but the request continues
                self.counters.lost += 1
        if oldest.file is None:
            self.drop([oldest])
        else:
            oldest.pages.rewind(0)
            oldest.pages = None  # type: ignore[assignment]
