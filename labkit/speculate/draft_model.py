"""Draft with a smaller model, which decodes by itself with its own cache.

Rejected tokens are removed from its cache. Before it drafts, it reads all tokens that it
has not seen, in one pass. So it may skip passes, and it reads a prefix that the target
had cached only when it drafts. A batch needs one pass per drafted token, for all rows
that still draft.

Ids must mean the same for both models. Vocabularies may differ in padding; ids that the
target or the tokenizer lacks are never drafted. Cost: `cost` steps of the target per
drafted token, accepted or not.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from labkit.cache import ContiguousCache, KVCache
from labkit.errors import BadRequest
from labkit.generate.drafter import Draft, Drafter, Growing
from labkit.generate.loop import forward
from labkit.model.decoder import Decoder


class DraftModel(Drafter):
    """Draft with `model`, which is any decoder.

    `ids` [v] has the token of each logit. None means that logit i is for token i.
    """

    name = "draft_model"
    shares_cache = False  # whether its keys and values mean the same as the target's

    def __init__(self, model: Decoder, *, name: str | None = None, ids: Tensor | None = None):
        self.model, self.ids = model, ids
        self.name = name or self.name
        self.cache: Any = None
        self.usable: int | None = None  # the number of logits that may be drafted from

    def check(self, target: Decoder) -> None:
        ours, theirs = self.model.tokenizer, target.tokenizer
        width, most = self.model.config.vocab_size, target.config.vocab_size
        if ours is not None and theirs is not None:
            if ours is not theirs and ours.backend.get_vocab() != theirs.backend.get_vocab():
                raise BadRequest(
                    f"The draft {self.model.name} and the target {target.name} have different "
                    "tokenizers; use a draft of the same family."
                )
            most = min(most, theirs.vocab_size)
        elif width > most:
            raise BadRequest(
                f"The draft has {width} ids and the target {most}; use a draft with the target's "
                "vocabulary."
            )
        self.usable = None if self.ids is not None else min(width, most)

    def share(self, cache: KVCache | None) -> None:
        """Draft in the target's cache if this model's layers can read it."""
        same = self.model.kernels == "native" or (cache and cache.dtype == self.model.dtype)
        self.shared = self.shares_cache and type(cache) is ContiguousCache and bool(same)
        self.cache = cache

    def begin(self, request, rows, hidden=None) -> None:
        self.request = request
        if not self.shared:
            capacity = max(len(row.prompt) + row.budget for row in rows)
            self.cache = self.model.new_cache(len(rows), capacity)
            self.base = self.cache.lengths  # tokens of the text that are cached

    def propose(self, rows, limits) -> list[Draft]:
        size = self.model.config.vocab_size
        # With a smaller vocabulary, this model cannot read some tokens of the target.
        reads = size >= self.request.model.config.vocab_size
        drafting = [
            i for i, limit in enumerate(limits) if limit and (reads or max(rows[i].history) < size)
        ]
        cache, before = self.drafting_cache(), self.cache.lengths
        pieces = [rows[i].history[n:] if i in drafting else () for i, n in enumerate(before)]
        self.base = tuple(n + len(piece) for n, piece in zip(before, pieces))
        drafts = [Growing(self.request, *both, self.ids) for both in zip(rows, limits)]
        while drafting:
            logits = forward(self.model, cache, pieces)[:, 0]  # [B, v]
            drafting = [i for i in drafting if drafts[i].add(logits[i, : self.usable])]
            pieces = [draft.tokens[-1:] if i in drafting else () for i, draft in enumerate(drafts)]
        if self.shared:
            self.cache.rewind(before)  # the target writes there next
        return [draft.draft() for draft in drafts]

    def drafting_cache(self) -> KVCache:
        """Return the cache that `model` reads and writes."""
        return self.cache

    def observe(self, accepted, hidden=None) -> None:
        """Rewind the cache to the accepted tokens.

        If a whole draft was accepted, its last token was not read yet.
        """
        if not self.shared:
            ends = [base + kept for base, kept in zip(self.base, accepted)]
            self.cache.rewind(list(map(min, self.cache.lengths, ends)))
            self.base = self.cache.lengths

    def select(self, keep) -> None:
        if not self.shared:
            self.cache.select(keep)
            self.base = self.cache.lengths


def bytes_read(model: Decoder) -> int:
    """Return the number of bytes of weights that a step reads, in the layers and the head."""
    parts = [*model.layers, model.head]
    return sum(t.nbytes for part in parts for t in (*part.parameters(), *part.buffers()))


def shell(module: Any) -> Any:
    """Return a shallow copy of a module that shares its parameters and submodules."""
    view = copy.copy(module)
    for name, value in vars(module).items():  # submodules, parameters and hooks are in dictionaries
        if isinstance(value, dict):
            setattr(view, name, value.copy())
    return view
