"""Reuse the pages of a prompt's beginning for later prompts with the same beginning.

A hit replaces the prefill of P tokens by a look-up. Other users could detect that by
timing. So an entry is found only under the same tenant, authorization scope and model
fingerprint, and for exactly the same tokens. Only the server can declare a prefix
public; a request cannot. A request gets a `PrefixView`, and the server sets its tenant
and scope.

    lease = view.lookup(tokens)
    view.keep(lease, cache, row, tokens, documents)

`lookup` returns a fork of the longest stored prefix and leaves at least one token to
compute. `keep` stores whole blocks, within the budget.

Entries are forgotten by tenant, scope, prefix, document or age, in memory and on disk.
Freed blocks are set to zeros. A request that began before an entry was forgotten does
not store its result, but it keeps its own blocks until it ends. Cost: a look-up
compares the prompt with each entry of its identity.

When it loses: prompts that share less than one block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from labkit.cache.paged.blocks import PoolFull
from labkit.cache.paged.cache import PagedCache
from labkit.cache.paged.pool import PagePool
from labkit.cache.prefix.disk import DiskTier, UntrustedFile, load
from labkit.cache.prefix.entry import Documents, Entry, Fingerprint, Identity, Lease, Tokens, common
from labkit.cache.prefix.shelf import Shelf
from labkit.errors import BadRequest, whole_number


def _checked_tokens(tokens: Iterable[int]) -> Tokens:
    """Return the tokens as a tuple of ints; raise BadRequest if there are none."""
    tokens = tuple(whole_number(token, "A token") for token in tokens)
    if not tokens:
        raise BadRequest("There are no tokens; give those of the whole prompt.")
    return tokens


def _checked_documents(documents: Documents) -> dict[str, int]:
    """Return {name: first token that the document could influence}.

    For a list of names, every start is 0.
    """
    starts = documents if isinstance(documents, Mapping) else dict.fromkeys(documents or (), 0)
    texts = all(isinstance(name, str) for name in starts) and not isinstance(documents, str)
    if not texts or any(whole_number(n, "A document's first token") < 0 for n in starts.values()):
        raise BadRequest("The documents are not valid; give names, or {name: first token}.")
    return dict(starts)


class PrefixStore:
    """The server's side of a prefix cache: it stores entries and forgets them.

    Entries use up to `budget_bytes` of the memory of `pool`. `ttl_s` is the maximum age
    of an entry in seconds (None: no limit); using an entry does not renew it. `clock`
    is the wall clock, because entries on disk outlive the process. `disk` is a second
    tier (None: entries stay in memory only). Not thread-safe: use one lock for store
    and pool.
    """

    def __init__(
        self,
        pool: PagePool,
        budget_bytes: int,
        *,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.time,
        disk: DiskTier | None = None,
    ):
        if ttl_s is not None and not ttl_s > 0:
            raise BadRequest(f"ttl_s is {ttl_s}; give more than 0 seconds, or None for no limit.")
        self.shelf = Shelf(pool, budget_bytes, disk)
        self.pool, self.ttl_s, self.clock = pool, ttl_s, clock
        self.counters, self.epoch = self.shelf.counters, 0
        self.sweep()

    def open(self, tenant: str, scope: str, model: Fingerprint) -> PrefixView:
        """Return the view for requests of a tenant under a scope.

        The server calls this with its own values, never with values from a request.
        """
        if tenant is None:
            raise BadRequest("The tenant is None; give a name, or use declare_public.")
        return PrefixView(self, Identity(tenant, scope, model))

    def declare_public(
        self, model: Fingerprint, tokens: Sequence[int], cache: PagedCache, row: int = 0
    ) -> int:
        """Let every tenant of `model` find these tokens, which are in `cache`.

        Returns the number of tokens stored.
        """
        lease = Lease(cache, 0, {}, self.epoch)
        return PrefixView(self, Identity(None, "", model)).keep(lease, cache, row, tokens)

    def forget(
        self,
        *,
        tenant: str | None = None,
        scope: str | None = None,
        prefix: Sequence[int] | None = None,
    ) -> int:
        """Drop every entry that matches all arguments, in memory and on disk.

        Returns the number of entries dropped.
        """
        if tenant is None and scope is None and prefix is None:
            raise BadRequest("Nothing to forget; give a tenant, a scope or a prefix.")
        first = () if prefix is None else _checked_tokens(prefix)

        def matches(entry: Entry) -> bool:
            owner = entry.identity
            scoped = scope is None or (owner.scope == scope and owner.tenant is not None)
            return tenant in (None, owner.tenant) and scoped and entry.tokens[: len(first)] == first

        return self._forget([entry for entry in self.entries() if matches(entry)])

    def revoke(self, document: str, tenant: str | None = None) -> int:
        """Drop everything built on a document (of one tenant, or of all).

        Tokens before the document stay. Returns the number of entries dropped or cut.
        """
        size, drop, cut = self.pool.size, [], []
        for entry in self.entries():
            if document in entry.documents and tenant in (None, entry.identity.tenant):
                length = entry.documents[document] // size * size
                if length and entry.pages is not None:
                    entry.cut(length)
                    cut.append(entry)
                else:
                    drop.append(entry)
        self._forget(drop)
        for entry in cut:
            self.shelf.delete_file(entry)
        return len(drop) + len(cut)

    def sweep(self) -> int:
        """Drop expired entries and return their number.

        Every look-up calls this. If there may be no look-ups, call it from a timer.
        """
        now = self.clock()
        old = [entry for entry in self.entries() if not entry.alive(now)]
        self.counters.expired += len(old)
        return self.shelf.drop(old)

    def entries(self) -> list[Entry]:
        return list(self.shelf.entries)

    def nbytes(self) -> int:
        """Return the bytes of all blocks in memory; shared blocks count once."""
        return self.shelf.nbytes()

    def __repr__(self) -> str:
        c, entries = self.counters, len(self.entries())
        return f"PrefixStore({entries} entries, {self.nbytes()} bytes, {c.hits} hits, {c.misses} misses)"

    def __getstate__(self) -> None:
        raise BadRequest("A prefix store cannot be pickled or copied; use a DiskTier instead.")

    def _forget(self, entries: Sequence[Entry]) -> int:
        self.epoch += 1
        self.counters.forgotten += len(entries)
        return self.shelf.drop(entries)


class PrefixView:
    """The request's side of a prefix cache, for one tenant and scope."""

    def __init__(self, store: PrefixStore, identity: Identity):
        self._store, self._identity = store, identity

    def __repr__(self) -> str:
        return "PrefixView(one tenant)"

    def lookup(self, tokens: Sequence[int]) -> Lease:
        """Return the longest stored beginning of `tokens`, without the last token."""
        store, tokens = self._store, _checked_tokens(tokens)
        store.sweep()
        best, length = self._longest(tokens)
        if best is None:
            store.counters.misses += 1
            return Lease(PagedCache.over(store.pool), 0, {}, store.epoch)
        store.counters.hits += 1
        store.counters.tokens_found += length
        store.shelf.touch(best)
        cache = best.pages.fork()
        cache.rewind(length)
        documents = {name: start for name, start in best.documents.items() if start < length}
        return Lease(cache, length, documents, store.epoch)

    def keep(
        self,
        lease: Lease,
        cache: PagedCache,
        row: int,
        tokens: Sequence[int],
        documents: Documents = None,
    ) -> int:
        """Store the whole blocks of `tokens`, which are in row `row` of `cache`.

        `documents` are the sources of the prompt: names, or {name: first token that the
        document could influence}. Returns the number of tokens stored. That is 0 if
        they exceed the budget, or if something was forgotten since the look-up.
        """
        store, shelf, tokens = self._store, self._store.shelf, _checked_tokens(tokens)
        built_on = _checked_documents(documents)
        if cache.pool is not store.pool:
            raise BadRequest("The cache has another pool than the store; use one pool for both.")
        if not 0 <= row < cache.batch:
            raise BadRequest(f"The row to keep is {row}; give one from 0 to {cache.batch - 1}.")
        length = min(len(tokens), cache.lengths[row]) // store.pool.size * store.pool.size
        if lease.epoch != store.epoch or length == 0:
            store.counters.stale += lease.epoch != store.epoch
            return 0
        for name, start in lease.documents.items():
            built_on[name] = min(start, built_on.get(name, start))
        tokens = tokens[:length]
        same = [entry for entry in shelf.of(self._identity) if entry.tokens[:length] == tokens]
        if same:
            new = same[0].new_documents(built_on)
            if not new or same[0].pages is not None:
                if new:
                    same[0].documents |= new
                    shelf.delete_file(same[0])  # its header lacks the new documents
                shelf.touch(same[0])
                return length
            shelf.drop(same[:1])
        pages, now = cache.fork([row]), store.clock()
        pages.rewind(length)
        expires = None if store.ttl_s is None else now + store.ttl_s
        entry = Entry(self._identity, tokens, {}, now, expires, shelf.layout, pages)
        entry.documents = entry.new_documents(built_on)
        return length if shelf.add(entry) else 0

    def _longest(self, tokens: Tokens) -> tuple[Entry | None, int]:
        """Load the entry with the longest common prefix, at least a block.

        Returns (None, 0) if there is none, or if the pool is too full to load it.
        """
        store, shelf = self._store, self._store.shelf
        public = Identity(None, "", self._identity.model)
        best, length = None, store.pool.size - 1  # only whole blocks are reused
        for entry in [*shelf.of(self._identity), *shelf.of(public)]:
            shared = min(common(entry.tokens, tokens), len(tokens) - 1)
            if shared > length:
                best, length = entry, shared
        if best is not None and best.pages is None:
            try:
                best.pages = load(shelf.disk, best, store.pool)
                store.counters.loaded += 1
            except PoolFull:
                return None, 0
            except UntrustedFile:
                store.counters.untrusted += 1
                shelf.drop([best])  # also delete its file, which `forget` could not find later
                return self._longest(tokens)
        return best, length
