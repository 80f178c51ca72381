"""A cache that keeps at most `budget` tokens a layer: the mechanism, without an opinion on which.

After each pass, a layer that holds too many drops those of the lowest score; the first `sinks` and the newest `recent`
tokens are always kept, and at least one token. Each layer and row chooses for itself; what stays keeps the position it
was rotated at, so nothing is turned. New tokens of a pass are attended to before anything is dropped.

    bytes = sum over layers of min(tokens, budget) * (2 * K * D numbers + 12)      12: its position and its note

A method is one function more (`score`), see `eviction.py`. What was dropped is gone: a question about it gets an answer
from what is left, and going back before the last eviction is refused. Its memory is bounded, its answer is not exact.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from labkit.cache.contract import KVCache
from labkit.cache.ring import NOWHERE
from labkit.cache.step import Step, attend_dense
from labkit.errors import BadRequest, whole_number
from labkit.plan.memory import KVShape


class EvictingCache(KVCache):
    """Keeps `budget` tokens a layer, or, where it is a fraction, that share of the tokens seen; never less than one."""

    def __init__(self, shape: KVShape, batch: int = 1, capacity: int | None = None, dtype: torch.dtype = torch.float32,
                 device: str | torch.device = "cpu", budget: int | float = 512, sinks: int = 4, recent: int = 64):  # fmt: skip
        super().__init__(shape, batch, capacity, dtype, device)
        if not isinstance(budget, float):
            budget = whole_number(budget, "The budget of tokens to keep", 1)
        elif not 0 < budget <= 1:
            raise BadRequest(f"The budget is {budget}; give a whole number of tokens to keep, or a share above 0 and up to 1.0.")
        sinks, recent = whole_number(sinks, "The number of sinks", 0), whole_number(recent, "The number of recent tokens", 0)
        if any(layer.shared_with is not None or layer.latent_dim is not None for layer in shape.layers):
            raise BadRequest("Layers that share caches or hold latents (MLA) cannot choose what to keep each for itself.")
        self.budget, self.sinks, self.recent = budget, sinks, recent
        empty = lambda i, width: torch.zeros(batch, shape.layers[i].num_kv_heads, 0, width, dtype=dtype, device=device)  # noqa: E731
        self.keys = [empty(i, layer.head_dim) for i, layer in enumerate(shape.layers)]
        self.values = [k.clone() for k in self.keys]
        self.positions = [torch.zeros(batch, 0, dtype=torch.long, device=device) for _ in shape.layers]
        self.notes = [torch.zeros(batch, 0, device=device) for _ in shape.layers]  # [B, S], what a method wants to remember
        self._evicted_at = [0] * batch  # how long a row was when it last dropped a token

    @abstractmethod
    def score(self, layer: int, queries: Tensor, scale: float | None) -> Tensor:
        """How much each held token is worth keeping: [B, S] float32, larger is better. The hook of a method."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        real = torch.arange(keys.shape[2], device=self.device) < torch.tensor(self.step.counts, device=self.device)[:, None]
        new = self.step.positions.where(real, NOWHERE)  # [B, T]
        self.keys[layer] = torch.cat([self.keys[layer], keys.to(self.dtype)], 2)
        self.values[layer] = torch.cat([self.values[layer], values.to(self.dtype)], 2)
        self.positions[layer] = torch.cat([self.positions[layer], new], 1)
        self.notes[layer] = torch.cat([self.notes[layer], torch.zeros(new.shape, device=self.device)], 1)

    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        spec = self.shape.layers[layer]
        out = attend_dense(self.step, queries, self.keys[layer], self.values[layer], scale=scale, window=spec.window,
                           sinks=spec.sinks, key_positions=self.positions[layer])  # fmt: skip
        score, positions = self.score(layer, queries, scale), self.positions[layer]
        lengths = torch.tensor(self.lengths, device=self.device)[:, None]  # [B, 1]
        share = isinstance(self.budget, float)
        most = (lengths * self.budget).long().clamp(min=1) if share else torch.full_like(lengths, self.budget)
        sinks = most.clamp(max=self.sinks)
        sure = (positions < sinks) | (positions >= lengths - (most - sinks).clamp(max=self.recent))
        held = positions < NOWHERE
        score = score.masked_fill(sure, float("inf")).masked_fill(~held, float("-inf"))
        rank = score.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # [B, S], 0 the best
        over = (held.sum(1) > most[:, 0]).tolist()
        self._evicted_at = [n if o else at for n, o, at in zip(self.lengths, over, self._evicted_at)]
        self._keep(layer, held & (rank < most))
        return out

    def _keep(self, layer: int, stay: Tensor) -> None:
        """Slots where `stay` [B, S] remain, oldest first; rows that keep fewer than others end in empty slots."""
        self.positions[layer] = self.positions[layer].where(stay, NOWHERE)
        most = int(stay.sum(1).max())
        if most == stay.shape[1]:
            return
        slots = stay.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
        for side in (self.keys, self.values):
            held = side[layer]
            side[layer] = held.gather(2, slots[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3]))
        for side in (self.positions, self.notes):
            side[layer] = side[layer].gather(1, slots)

    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in (*self.keys, *self.values, *self.positions, *self.notes))

    def nbytes_used(self) -> int:
        size = self.dtype.itemsize
        return sum((2 * layer.num_kv_heads * layer.head_dim * size + 12) * int((positions < NOWHERE).sum())
                   for layer, positions in zip(self.shape.layers, self.positions))  # fmt: skip

    def most_at_once(self) -> tuple[int | None, ...]:
        """While nothing is dropped any number; from then on what a token drops cannot come back."""
        share = isinstance(self.budget, float)
        return tuple(1 if share else max(1, int(self.budget) - length) for length in self.lengths)

    def _reserve(self, lengths: tuple[int, ...], step: Step) -> None:
        """Nothing: a layer's memory is what it holds."""

    def _rewind(self, lengths: tuple[int, ...]) -> None:
        for row, (keep, at) in enumerate(zip(lengths, self._evicted_at)):
            if 0 < keep < at:
                raise BadRequest(f"Row {row} cannot go back to {keep} tokens: it dropped some at {at}; go back to 0 or {at}.")
        self._evicted_at = [min(keep, at) for keep, at in zip(lengths, self._evicted_at)]
        ends = torch.tensor(lengths, device=self.device)[:, None]
        for layer, positions in enumerate(self.positions):
            self._keep(layer, positions < ends)

    def _select(self, rows: tuple[int, ...]) -> None:
        order = torch.tensor(rows, device=self.device)
        for side in (self.keys, self.values, self.positions, self.notes):
            side[:] = [t.index_select(0, order) for t in side]
        self._evicted_at = [self._evicted_at[row] for row in rows]
