"""Generate with a prefix store: reuse the cached beginning of each prompt and store the rest.

    lookup    the cached beginning becomes the row's first blocks; they are shared, not copied
    prefill   computes the rest of each prompt, at least one token
    keep      stores the prompt when its first token is known, so the next request can use it

There is one view per prompt, so a batch may have rows of several tenants. None sees the
entries of another. A batch that fails stores nothing, and its blocks return to the pool.
When it loses: prompts that share nothing pay for a look-up and the block tables.
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
    """Yield the tokens of `decode` with a cache that is joined from the views' entries.

    `prefixes` is one view for all prompts, or one per prompt. Raises BadRequest before
    any work if their number is wrong.
    """
    rows, documents = request.rows, request.options.documents
    views = [prefixes] * len(rows) if isinstance(prefixes, PrefixView) else list(prefixes)
    sources: list[Any] = [documents] if request.single else list(documents or [None] * len(rows))
    if len(views) != len(rows) or len(sources) != len(rows):
        raise BadRequest(
            f"There are {len(views)} views and {len(sources)} sets of documents for "
            f"{len(rows)} prompts; give one each."
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
            yield token  # first, so that the reader does not wait for the store
            i = token.row
            if token.id is not None and i not in kept:
                kept.add(i)
                views[i].keep(leases[i], cache, i, rows[i].prompt, sources[i])
    finally:
        cache.rewind(0)
