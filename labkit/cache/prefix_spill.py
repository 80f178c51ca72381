"""Entries of the prefix store to files and back: what is written beside the tensors, and what is checked before use.

A file says whose it is, for which model, tokens, documents, age, and how a token is stored (`layout`). After reading, all
of that must still be what the store's own list says, and every tensor must have the pool's shape and dtype.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
from torch import Tensor

from labkit.cache.paged import PagedCache
from labkit.cache.pages import PagePool, copyable
from labkit.cache.prefix_disk import DiskTier, Refused
from labkit.cache.prefix_entry import Entry, checked_documents, checked_tokens
from labkit.cache.prefix_identity import Identity
from labkit.errors import BadRequest


def layout(pool: PagePool) -> str:
    """How the pool stores a token, in words that are equal only where the bytes mean the same."""
    named = [[name, list(t.shape[1:]), str(t.dtype)] for name, t in _named(pool).items()]
    return json.dumps([pool.name, pool.size, named])


def _named(pool: PagePool) -> dict[str, Tensor]:
    return {f"{layer}.{side}.{name}": tensor for layer, sides in pool.held.items() for side, held in enumerate(sides)
            for name, tensor in held.items()}  # fmt: skip


def about(entry: Entry) -> dict:
    return {"identity": entry.identity.to_json(), "tokens": list(entry.tokens), "documents": entry.documents,
            "created": entry.created, "expires": entry.expires, "layout": entry.layout}  # fmt: skip


def tensors_of(entry: Entry) -> dict[str, Tensor]:
    """The blocks of the entry in order, layer by layer, copied out of the pool."""
    table = entry.pages.tables[0]
    return {name: copyable(tensor)[table].view(tensor.dtype) for name, tensor in _named(entry.pages.pool).items()}


def found_on_disk(disk: DiskTier) -> Iterator[Entry]:
    """The entries that an earlier process left; refuses the first file that does not say what it should."""
    for name, said in disk.scan():
        try:
            yield Entry(Identity.from_json(said["identity"]), checked_tokens(said["tokens"]), checked_documents(said["documents"]),
                        float(said["created"]), None if said["expires"] is None else float(said["expires"]),
                        str(said["layout"]), file=name)  # fmt: skip
        except (KeyError, TypeError, ValueError, BadRequest):
            raise Refused(f"The prefix {name[:8]}... does not say whose it is; delete it.") from None


def fill(disk: DiskTier, entry: Entry, pool: PagePool) -> PagedCache:
    """The entry's pages, read back into the pool; refused unless everything is as it was written."""
    said, tensors = disk.read(entry.file)
    expected = _named(pool)
    blocks = len(entry.tokens) // pool.size
    if {key: value for key, value in said.items() if key != "random"} != about(entry):
        raise Refused(f"The prefix {entry.file[:8]}... is another than the one that was written; it is not used.")
    fits = tensors.keys() == expected.keys() and all(
        t.dtype == expected[name].dtype and t.shape == (blocks, *expected[name].shape[1:]) for name, t in tensors.items()
    )
    if not fits:
        raise Refused(f"The prefix {entry.file[:8]}... has tensors of other shapes than the pool; it is not used.")
    pages = PagedCache.over(pool)
    pages.tables[0] += pool.allocate(blocks)
    pages.lengths = (blocks * pool.size,)
    with torch.no_grad():
        for name, tensor in tensors.items():
            copyable(expected[name])[pages.tables[0]] = copyable(tensor).to(pool.device)
    return pages
