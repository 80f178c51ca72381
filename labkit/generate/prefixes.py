"""Generation over a prefix store: look each prompt up, compute only what is not held, keep what was computed.

    lookup    the held beginning becomes the row's first blocks, shared and not copied
    prefill   the rest of each prompt, at least one token
    keep      as soon as the first token is known, so that the next request need not wait for this one to end

One view a prompt, so a batch may hold rows of several tenants; none sees another's entries. A batch that fails keeps
nothing, and its blocks go back to the pool. When it loses: prompts that share nothing pay a look-up and the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labkit.cache.paged import PagedCache
from labkit.cache.prefix import Documents, PrefixView
from labkit.errors import BadRequest
from labkit.generate.completion import Completion, Token
from labkit.generate.loop import GREEDY, decode
from labkit.generate.request import encode_prompts, prepare, wants_tokens
from labkit.generate.sampling import Sampling


def generate_with_prefixes(
    model,
    prompts: str | Sequence,
    view: PrefixView | Sequence[PrefixView],
    *,
    documents: Documents | Sequence[Documents] = None,
    max_new_tokens: int | Sequence[int] = 128,
    sampling: Sampling = GREEDY,
    end_ids: int | Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    on_token: Callable[[Token], object] | None = None,
    cancel=None,
    prefill_chunk: int | None = None,
) -> Completion | list[Completion]:
    """As `generate`; `view` (one, or one a prompt) says whose requests these are. `documents`: what the prompt was built
    on, {name: first token that it could influence}; for several prompts a list of those."""
    encoded, single = encode_prompts(model, prompts)
    views = [view] * len(encoded) if isinstance(view, PrefixView) else list(view)
    built_on = [documents] if single else [None] * len(encoded) if documents is None else list(documents)
    if len(views) != len(encoded) or len(built_on) != len(encoded):
        raise BadRequest(f"{len(views)} views and {len(built_on)} lists of documents for {len(encoded)} prompts; give one each.")
    leases = [view.lookup(tokens) for view, tokens in zip(views, encoded)]
    cache = PagedCache.join(lease.cache for lease in leases)
    for lease in leases:
        lease.cache.rewind(0)  # the joined rows hold the blocks now, and nobody else does
    try:
        request = prepare(model, encoded, max_new_tokens=max_new_tokens, sampling=sampling, end_ids=end_ids, stop=stop,
                          cache=cache, cancel=cancel, prefill_chunk=prefill_chunk, texts=wants_tokens(on_token))  # fmt: skip
        kept: set[int] = set()
        for token in decode(request):
            row = token.row
            if on_token is not None:
                on_token(token)
            if token.id is not None and row not in kept:  # after the first token was handed on: nobody waits for this
                kept.add(row)
                views[row].keep(leases[row], cache, row, encoded[row], built_on[row])
        completions = [row.completion(model) for row in request.rows]
    finally:
        cache.rewind(0)
    return completions[0] if single else completions
