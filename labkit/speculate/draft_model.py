"""A smaller model as the drafter: it decodes a few tokens by itself, with a cache of its own.

Its cache follows the committed text: before it drafts, it forgets what was refused and reads what it has not seen, in one
pass (after a run that was kept whole, the last drafted token and the target's own). So it may skip steps, and a prefix that
the target had in its cache is read when it is needed. Batches: one pass a drafted token for all rows that still draft.

Both must read the same ids. Vocabularies that differ only in padding do; ids that the target or the tokenizer lacks are
never drafted. Cost: `cost` steps of the target for each drafted token, whether it is kept or not.
"""

from __future__ import annotations

import copy
from contextlib import suppress

import torch

from labkit.cache import ContiguousCache
from labkit.errors import BadRequest
from labkit.generate.loop import forward
from labkit.generate.sampling import InvalidLogits
from labkit.model.native_decoder import NativeDecoder
from labkit.speculate.draft import Draft, Drafter, choose, drafted


class DraftModel(Drafter):
    """`model`: any decoder with `forward(tokens, cache, counts, last_only)` and `new_cache`. `ids` [v]: the tokens that its
    logits are for, where it has a trimmed head."""

    name = "draft_model"
    shares_cache = False  # whether its layers mean the same by keys and values as the target's

    def __init__(self, model, *, name: str | None = None, ids: torch.Tensor | None = None):
        self.model, self.ids = model, ids
        self.name = name or self.name
        self.cache = self._shared = None
        self._usable: int | None = None  # logits that may be drafted from

    def check(self, target) -> None:
        ours, theirs = self.model.tokenizer, target.tokenizer
        width, most = self.model.config.vocab_size, target.config.vocab_size
        if ours is not None and theirs is not None:
            if ours is not theirs and ours.backend.get_vocab() != theirs.backend.get_vocab():
                raise BadRequest(
                    f"The draft {self.model.name} and the target {target.name} have different tokenizers, so the same ids "
                    "mean different texts; use a draft of the same family."
                )
            most = min(most, theirs.vocab_size)
        elif width > most:
            raise BadRequest(
                f"The draft knows {width} ids and the target {most}, and without tokenizers nobody can say that the rest is "
                "padding; use a draft with the target's vocabulary."
            )
        self._usable = None if self.ids is not None else min(width, most)

    def share(self, cache) -> None:
        """Draft in the target's own cache, where this model's layers can read it; see `shares_cache`."""
        fits = self.shares_cache and type(cache) is ContiguousCache
        fits = fits and (cache.dtype == self.model.dtype or isinstance(self.model, NativeDecoder))
        self._shared = cache if fits else None

    def begin(self, request, rows, hidden=None) -> None:
        self.request = request
        if self._shared is None:
            self.cache = self.model.new_cache(len(rows), capacity=max(len(row.prompt) + row.budget for row in rows))
            self._base = self.cache.lengths  # what each row of the cache held of the text when the last draft began
        else:
            self.cache = self._shared

    def propose(self, rows, limits) -> list[Draft]:
        known = self.model.config.vocab_size
        reads = known >= self.request.model.config.vocab_size  # else the target may have said what this model cannot read
        drafting = [i for i, limit in enumerate(limits) if limit and (reads or max(rows[i].history) < known)]
        cache, before = self._drafting_cache(), self.cache.lengths
        pieces = [rows[i].history[held:] if i in drafting else () for i, held in enumerate(before)]
        self._base = tuple(held + len(piece) for held, piece in zip(before, pieces))
        drafts: list[list[int]] = [[] for _ in rows]
        drawn: list[list[torch.Tensor]] = [[] for _ in rows]
        while drafting:
            logits = forward(self.model, cache, pieces)[:, 0]  # [B, v]
            pieces = [()] * len(rows)
            for i in drafting:
                with suppress(InvalidLogits):  # nothing is left that it may draft
                    token, q = choose(logits[i, : self._usable], self.request, rows[i], drafts[i], self.ids)
                    drafts[i].append(token)
                    drawn[i] += () if q is None else (q,)
                    pieces[i] = (token,) if len(drafts[i]) < limits[i] else ()
            drafting = [i for i in drafting if pieces[i]]
        if self._shared is not None:
            self.cache.rewind(before)  # the target writes there next
        return [drafted(tokens, qs) for tokens, qs in zip(drafts, drawn)]

    def _drafting_cache(self):
        return self.cache

    def observe(self, accepted, hidden=None) -> None:
        """Forget what was refused. A draft that was kept whole leaves its last token to be read with the next."""
        if self._shared is None:
            self.cache.rewind([min(held, base + kept) for held, base, kept in zip(self.cache.lengths, self._base, accepted)])
            self._base = self.cache.lengths

    def select(self, keep) -> None:
        if self._shared is None:
            self.cache.select(keep)
            self._base = self.cache.lengths


def bytes_read(model) -> int:
    """Weights that a step reads: the layers and the head."""
    parts = (*model.layers, model.head)
    return sum(t.numel() * t.element_size() for part in parts for t in (*part.parameters(), *part.buffers()))


def shell(module: torch.nn.Module) -> torch.nn.Module:
    """Another shell around the same parts: what is set on it is not set on the original."""
    view = copy.copy(module)
    for name, value in vars(module).items():  # parts, parameters, hooks: dictionaries of its own with the same things in them
        if isinstance(value, dict):
            setattr(view, name, value.copy())
    return view
