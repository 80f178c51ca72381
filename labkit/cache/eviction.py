"""Limit a cache to `budget` tokens per layer, by one of two eviction methods.

    KeyNorm    keeps keys of small norm; in trained models they get the most attention
               (arXiv 2406.11430)
    Observed   keeps the tokens that got the most attention so far, over heads and
               queries (H2O, arXiv 2306.14048)

The new tokens of a pass attend to all cached tokens first. Then each layer with too
many tokens drops those with the lowest scores. The first `sinks` and the newest
`recent` tokens always stay. Each layer and row chooses independently. The remaining
tokens keep their RoPE positions; keys are not rotated again.

    bytes = sum over layers of min(tokens, budget) * (2 * K * D numbers + 12)

The 12 bytes are a token's position (8) and its note (4). Observed uses the note for its
running score.

To add a method, write a class with a `score` and add a line to `CACHES`. The tests of
all eviction methods then run on it. KeyNorm costs one pass over the keys, Observed a
second softmax.

When it loses: dropped tokens cannot come back. So answers are not exact, and `rewind`
past the last eviction raises BadRequest. If a question follows a long text, tokens are
dropped before the question is known.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from labkit.cache.contract import KVCache, grown
from labkit.cache.forward_pass import NOWHERE, Slots, Step, attend_dense, visible
from labkit.errors import BadRequest, whole_number


class EvictingCache(KVCache):
    """A cache that keeps `budget` tokens per layer.

    The first `sinks` tokens stay, and the newest `recent`, as far as the budget allows.
    The other arguments are those of KVCache.
    """

    stores_latents = shares_layers = False

    def __init__(
        self, *sizes: Any, budget: int = 512, sinks: int = 4, recent: int = 64, **rest: Any
    ):
        super().__init__(*sizes, **rest)
        self.budget = whole_number(budget, "The budget of tokens to keep", 1)
        self.sinks = whole_number(sinks, "The number of sinks", 0)
        self.recent = whole_number(recent, "The number of recent tokens", 0)
        heads = [(self.batch, spec.num_kv_heads, 0, spec.head_dim) for spec in self.shape.layers]
        rows = [(self.batch, 0)] * self.shape.num_layers
        self.keys = [grown(None, size, self.dtype, self.device) for size in heads]
        self.values = [grown(None, size, self.dtype, self.device) for size in heads]
        self.positions = [grown(None, size, torch.long, self.device) for size in rows]
        # [B, S] per layer, for the method; a note stays with its token
        self.notes = [grown(None, size, torch.float32, self.device) for size in rows]
        self._evicted_at = [0] * self.batch  # each row's length when it last dropped a token

    @abstractmethod
    def score(self, layer: int, queries: Tensor, scale: float | None) -> Tensor:
        """Score the cached tokens: [B, S] float32. The lowest are dropped.

        Called after the new tokens have attended; `queries` [B, H, T, D] and `scale` are
        those of `attend`. Sinks and recent tokens stay whatever their score. In a ragged
        batch some slots are empty (their position is NOWHERE). Their scores are ignored,
        but a mean or a softmax over a row must leave them out.
        """

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        for side, new in ((self.keys, keys), (self.values, values)):
            side[layer] = torch.cat([side[layer], new.to(self.dtype)], 2)
        positions = self.step.positions.where(self.step.real(), NOWHERE)  # [B, T]
        self.positions[layer] = torch.cat([self.positions[layer], positions], 1)
        self.notes[layer] = pad(self.notes[layer], (0, self.step.num_tokens))

    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        spec, slots = self.shape.layers[layer], Slots(self.positions[layer])
        keys, values = self.keys[layer], self.values[layer]
        out = attend_dense(self.step, queries, keys, values, scale, spec, slots)
        self._evict(layer, self.score(layer, queries, scale))
        return out

    def _evict(self, layer: int, score: Tensor) -> None:
        """Drop the tokens of lowest score [B, S] until each row fits the budget."""
        positions = self.positions[layer]  # [B, S]
        lengths = self.step.per_row(self.lengths)  # [B, 1]
        sinks = min(self.sinks, self.budget)
        recent = min(self.recent, self.budget - sinks)
        sure = (positions < sinks) | (positions >= lengths - recent)
        filled = positions < NOWHERE
        score = score.masked_fill(sure, float("inf")).masked_fill(~filled, float("-inf"))
        best_first = score.argsort(dim=1, descending=True, stable=True)
        rank = best_first.argsort(dim=1)  # [B, S], 0 is the best
        for row, over in enumerate((filled.sum(1) > self.budget).tolist()):
            if over:
                self._evicted_at[row] = self.lengths[row]
        self._keep(layer, filled & (rank < self.budget))

    def _keep(self, layer: int, stay: Tensor) -> None:
        """Keep the slots in `stay` [B, S], oldest first.

        Shorter rows end in empty slots.
        """
        self.positions[layer] = self.positions[layer].where(stay, NOWHERE)
        most = int(stay.sum(1).max())
        if most == stay.shape[1]:
            return
        slots = stay.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
        for side in (self.keys, self.values):
            K, D = side[layer].shape[1], side[layer].shape[3]
            side[layer] = side[layer].gather(2, slots[:, None, :, None].expand(-1, K, -1, D))
        for notes in (self.positions, self.notes):
            notes[layer] = notes[layer].gather(1, slots)

    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values, *self.positions, *self.notes]

    def nbytes_used(self) -> int:
        counts = (int((positions < NOWHERE).sum()) for positions in self.positions)
        widths = (2 * layer.num_kv_heads * layer.head_dim for layer in self.shape.layers)
        return sum(n * (w * self.dtype.itemsize + 12) for n, w in zip(counts, widths))

    def most_at_once(self) -> tuple[int | None, ...]:
        """Return how many more tokens fit into the budget, but at least 1."""
        return tuple(max(1, self.budget - length) for length in self.lengths)

    def _cached_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer].float(), self.positions[layer]

    def _reserve(self, lengths: tuple[int, ...], step: Step) -> None:
        """Do nothing: a layer allocates memory in `append`."""

    def _rewind(self, lengths: tuple[int, ...]) -> None:
        for row, (keep, at) in enumerate(zip(lengths, self._evicted_at)):
            if 0 < keep < at:
                raise BadRequest(
                    f"Row {row} cannot go back to {keep} tokens, because it dropped some at {at}; "
                    f"give 0, or at least {at}."
                )
        self._evicted_at = list(map(min, lengths, self._evicted_at))
        ends = torch.tensor(lengths, device=self.device)[:, None]
        for layer, positions in enumerate(self.positions):
            self._keep(layer, positions < ends)

    def _select(self, rows: tuple[int, ...], order: Tensor) -> None:
        for side in (self.keys, self.values, self.positions, self.notes):
            side[:] = [t.index_select(0, order) for t in side]
        self._evicted_at = [self._evicted_at[row] for row in rows]


class KeyNorm(EvictingCache):
    def score(self, layer: int, queries: Tensor, scale: float | None) -> Tensor:
        return -self.keys[layer].float().norm(dim=-1).mean(1)  # [B, K, S, D] -> [B, S]


class Observed(EvictingCache):
    def most_at_once(self) -> tuple[int | None, ...]:
        return (1,) * self.batch  # the attention of rejected tokens would stay in the notes

    def score(self, layer: int, queries: Tensor, scale: float | None) -> Tensor:
        keys, spec, (B, H, T, D) = self.keys[layer].float(), self.shape.layers[layer], queries.shape
        scaled = queries.float() * (D**-0.5 if scale is None else scale)
        grouped = scaled.reshape(B, keys.shape[1], -1, D)
        scores = (grouped @ keys.mT).view(B, H, T, -1)  # [B, H, T, S]
        seen = visible(self.step.positions, self.positions[layer], spec.window, spec.sinks)[:, None]
        weights = scores.masked_fill(~seen, torch.finfo(torch.float32).min).softmax(-1)
        real = self.step.real()[:, None, :, None]
        self.notes[layer] += (weights * real).sum((1, 2))  # a note stays with its token
        return self.notes[layer]
