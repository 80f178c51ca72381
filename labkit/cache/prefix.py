"""The prefix store: what was computed for the beginning of one prompt serves the next prompt that begins alike.

A hit turns prefill of P tokens into a look-up, and it is an event that others may time. So an entry is found only under
the same tenant, authorization scope and model fingerprint (`prefix_identity.py`) and for exactly the same tokens,
compared one by one; what serves everyone is declared public by the server, never guessed from a request. A request gets a
`PrefixView` whose tenant and scope the server has set.

    lease = view.lookup(tokens)      a fork of the longest held prefix (blocks are shared), at least one token left over
    view.keep(lease, cache, row, tokens, documents)      whole blocks, within the budget; least recently used go first

Forgetting is by tenant, scope, prefix, document or age, and reaches memory and disk; freed blocks are set to zeros, and
what was computed before something was forgotten is not stored after it. A running request ends with what it began with.
Cost: a look-up compares with each entry of its identity. When it loses: prompts that share less than a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from labkit.cache.blocks import PoolFull
from labkit.cache.paged import PagedCache
from labkit.cache.pages import PagePool
from labkit.cache.prefix_disk import DiskTier, Refused
from labkit.cache.prefix_entry import Entry, Lease, Tokens, checked_documents, checked_tokens, common
from labkit.cache.prefix_identity import Fingerprint, Identity
from labkit.cache.prefix_shelf import Shelf
from labkit.errors import BadRequest

Documents = Mapping[str, int] | Iterable[str] | None


class PrefixStore:
    """The server's side. `ttl_s`: seconds that an entry lives, whether used or not (None: no limit). `clock`: wall time,
    because entries on disk outlive the process. Not safe for threads: one lock around store and pool."""

    def __init__(self, pool: PagePool, budget_bytes: int, *, ttl_s: float | None = None,
                 clock: Callable[[], float] = time.time, disk: DiskTier | None = None):  # fmt: skip
        if ttl_s is not None and not ttl_s > 0:
            raise BadRequest(f"A life of {ttl_s} s ends before it begins; give more than 0 s, or None for no limit.")
        self.shelf = Shelf(pool, budget_bytes, disk)
        self.pool, self.ttl_s, self.clock, self.counters, self.epoch = pool, ttl_s, clock, self.shelf.counters, 0
        self.sweep()

    def open(self, tenant: str, scope: str, model: Fingerprint) -> PrefixView:
        """The view for requests of that tenant under that scope; called by the server, never with words of a request."""
        if tenant is None:
            raise BadRequest("A view belongs to a tenant; what is for everyone is declared by declare_public.")
        return PrefixView(self, Identity(tenant, scope, model))

    def declare_public(self, model: Fingerprint, tokens: Sequence[int], cache: PagedCache, row: int = 0) -> int:
        """Let every tenant of `model` find these tokens, which row `row` of `cache` holds; how many are stored."""
        lease = Lease(cache, 0, {}, self.epoch)
        return self._keep(Identity(None, "", model), lease, cache, row, checked_tokens(tokens), None)

    def forget(self, *, tenant: str | None = None, scope: str | None = None, prefix: Sequence[int] | None = None) -> int:
        """Drop every entry that matches all that is given, in memory and on disk; how many those were."""
        if tenant is None and scope is None and prefix is None:
            raise BadRequest("Nothing to forget was named; give a tenant, a scope, a prefix, or several of them.")
        prefix = None if prefix is None else checked_tokens(prefix)
        return self._forget([
            e for e in self.entries()
            if (tenant is None or e.identity.tenant == tenant)
            and (scope is None or (e.identity.scope == scope and e.identity.tenant is not None))
            and (prefix is None or e.tokens[: len(prefix)] == prefix)
        ])  # fmt: skip

    def revoke(self, document: str, tenant: str | None = None) -> int:
        """Drop everything built on a document (of one tenant, or of all); what lies before it stays."""
        size, gone, cut = self.pool.size, [], []
        for entry in self.entries():
            if document in entry.documents and tenant in (None, entry.identity.tenant):
                kept = entry.documents[document] // size * size
                (cut if kept and entry.pages is not None else gone).append((entry, kept))
        for entry, kept in cut:
            entry.cut(kept)
        self._forget([entry for entry, _ in gone])
        for entry, _ in cut:
            self.shelf.delete_file(entry)
        return len(gone) + len(cut)

    def sweep(self) -> int:
        """Drop what is too old; done at every look-up, and to be called by a timer where none may come."""
        now = self.clock()
        old = [entry for entry in self.entries() if not entry.alive(now)]
        self.counters.expired += len(old)
        return self.shelf.drop(old)

    def entries(self) -> list[Entry]:
        return self.shelf.all()

    def nbytes(self) -> int:
        """Bytes of the blocks that entries hold in memory; shared ones count once."""
        return self.shelf.nbytes()

    def __repr__(self) -> str:
        c = self.counters
        return f"PrefixStore({len(self.entries())} entries, {self.nbytes()} bytes, {c.hits} hits, {c.misses} misses)"

    def __getstate__(self):
        raise BadRequest("A prefix store is not pickled or copied: it holds what tenants said; give it a DiskTier instead.")

    def _forget(self, entries: Sequence[Entry]) -> int:
        self.epoch += 1
        self.counters.forgotten += len(entries)
        return self.shelf.drop(entries)

    def _lookup(self, identity: Identity, tokens: Tokens) -> Lease:
        self.sweep()
        most, best, length = len(tokens) - 1, None, self.pool.size - 1  # shorter than a block is not worth a fork
        for entry in [*self.shelf.of(identity), *self.shelf.of(identity.public())]:
            shared = min(common(entry.tokens, tokens), most)
            if shared > length:
                best, length = entry, shared
        if best is not None and best.pages is None:
            try:
                self.shelf.load(best)
            except PoolFull:
                best = None
            except Refused:
                self.counters.refused += 1
                self.shelf.drop([best])  # the file as well: nobody could ask for it to be forgotten later
                return self._lookup(identity, tokens)
        self.counters.tokens_asked += len(tokens)
        if best is None:
            self.counters.misses += 1
            return Lease(PagedCache.over(self.pool), 0, {}, self.epoch)
        self.counters.hits += 1
        self.counters.tokens_found += length
        self.shelf.touch(best)
        cache = best.pages.fork()
        cache.rewind(length)
        return Lease(cache, length, {n: start for n, start in best.documents.items() if start < length}, self.epoch)

    def _keep(self, identity: Identity, lease: Lease, cache: PagedCache, row: int, tokens: Tokens, documents: Documents) -> int:
        documents = checked_documents(documents)
        if cache.pool is not self.pool:
            raise BadRequest("The cache lies in another pool than the store; make both over one pool.")
        if not 0 <= row < cache.batch:
            raise BadRequest(f"Row {row} to keep of {cache.batch}; give rows from 0 to {cache.batch - 1}.")
        length = min(len(tokens), cache.lengths[row]) // self.pool.size * self.pool.size
        if lease.epoch != self.epoch or length == 0:
            self.counters.stale += lease.epoch != self.epoch
            return 0
        for name, start in lease.documents.items():
            documents[name] = min(start, documents.get(name, start))
        tokens = tokens[:length]
        same = next((entry for entry in self.shelf.of(identity) if entry.tokens[:length] == tokens), None)
        if same is not None and (same.pages is not None or not same.news(documents)):
            if same.news(documents):
                same.add(documents)
                self.shelf.delete_file(same)  # what it says of itself is no longer all
            self.shelf.touch(same)
            return length
        if same is not None:
            self.shelf.drop([same])
        now, pages = self.clock(), cache.fork([row])
        pages.rewind(length)
        ends = None if self.ttl_s is None else now + self.ttl_s
        entry = Entry(identity, tokens, {}, now, ends, self.shelf.layout, pages)
        entry.add(documents)
        return length if self.shelf.add(entry) else 0


class PrefixView:
    """What a request may do: look up and keep under the tenant and scope that the server has set."""

    def __init__(self, store: PrefixStore, identity: Identity):
        self._store, self._identity = store, identity

    @property
    def pool(self) -> PagePool:
        return self._store.pool

    def lookup(self, tokens: Sequence[int]) -> Lease:
        """The longest stored beginning of `tokens`, at most all but one of them."""
        return self._store._lookup(self._identity, checked_tokens(tokens))

    def keep(self, lease: Lease, cache: PagedCache, row: int, tokens: Sequence[int], documents: Documents = None) -> int:
        """Store the whole blocks of `tokens` that row `row` of `cache` holds; how many tokens that is, 0 where it may not."""
        return self._store._keep(self._identity, lease, cache, row, checked_tokens(tokens), documents)

    def __repr__(self) -> str:
        return f"PrefixView({self._identity!r})"
