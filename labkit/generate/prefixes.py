"""Generate over a prefix store: compute what is not cached, keep what is computed.

    lookup    the cached beginning becomes the row's first blocks, shared and not copied
    prefill   the rest of each prompt, at least one token
    keep      as soon as the first token is known, so that the next request need not wait for the end

There is one view per prompt, so a batch may hold rows of several tenants; none sees
another's entries. A batch that fails keeps nothing, and its blocks go back to the pool.
It loses on prompts that share nothing: they pay for a look-up and the block tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from labkit.cache.paged.cache import PagedCache
from labkit.cache.prefix.store import PrefixView
from labkit.errors import BadRequest
from labkit.generate.request import Request, check_given_cache
from labkit.generate.row import Tokens


def with_prefixes(
    request: Request,
    prefixes: PrefixView | Sequence[PrefixView],
    decode: Callable[[Request], Tokens],
) -> Tokens:
    """Yield the tokens that `decode` gives over a cache joined from the views' entries."""
    rows, documents = request.rows, request.options.documents
    views = [prefixes] * len(rows) if isinstance(prefixes, PrefixView) else list(prefixes)
    sources: list[Any] = [documents] if request.single else list(documents or [None] * len(rows))
    if len(views) != len(rows) or len(sources) != len(rows):
        raise BadRequest(
            f"{len(views)} views and {len(sources)} lists of documents were given for {len(rows)} "
            "prompts; give one for all or one each."
        )
    return _decode(request, views, sources, decode)


def _decode(request: Request, views, sources, decode) -> Tokens:
    rows = request.rows
    leases = [view.lookup(row.prompt) for view, row in zip(views, rows)]
    cache = PagedCache.join(lease.cache for lease in leases)
    for lease in leases:
        lease.cache.rewind(0)  # only the joined rows hold the blocks now
    kept: set[int] = set()
    try:
        request = replace(request, cache=cache)
        check_given_cache(request)
        for token in decode(request):
            yield token  # before anything is kept: nobody waits for that
            i = token.row
            if token.id is not None and i not in kept:
                kept.add(i)
                views[i].keep(leases[i], cache, i, rows[i].prompt, sources[i])
    finally:
        cache.rewind(0)
