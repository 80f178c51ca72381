"""Keep only the sinks and the newest `window` tokens in each layer.

The query at position p sees the key at position s if s > p - window or s < sinks.
Tokens that no later query can see are dropped. So a layer's memory is bounded, and a
decode step costs the same at token 100 and at token 100,000.

    bytes = sum over layers of 2 * K * D * min(tokens, window + sinks) numbers

Windows are the model's own (Mistral, Gemma 3: the answer is exact) or imposed on a
model without windows. In the second case a few sinks prevent the output from
degenerating (StreamingLLM, arXiv 2309.17453), but tokens outside the window are
forgotten. A prompt longer than the window may be read in one pass or in chunks: new
tokens attend to the cached tokens and to each other before anything is dropped.
`rewind` raises BadRequest if it needs a dropped token; with `slack` more tokens per
layer it can always go back slack + 1 tokens.

Slots form a ring. The first `sinks` positions keep their slots; position p after them
lies in slot sinks + (p - sinks) % ring with ring = window + slack, so nothing is ever
moved. The content of a slot follows from the row's length alone, except for what was
overwritten before a rewind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.cache.contract import KVCache, doubled, grown
from labkit.cache.forward_pass import NOWHERE, Slots, Step, attend_dense
from labkit.errors import BadRequest, whole_number
from labkit.plan.kv import KVShape


def positions_of(lengths: Tensor, slots: int, sinks: int, ring: int) -> Tensor:
    """Return the position in each slot [B, slots] of rows of `lengths` [B, 1]."""
    slot = torch.arange(slots, device=lengths.device)
    last = lengths - 1
    newest = last - (last - slot) % ring  # the largest position up to the last in this slot
    position = torch.where(slot < sinks, slot, newest)
    filled = (position <= last) & (position >= slot.clamp(max=sinks))
    return torch.where(filled, position, NOWHERE)


def _with_window(shape: KVShape, window: int, sinks: int) -> KVShape:
    """Impose a window on every layer; a layer's own narrower window stays."""
    layers = []
    for layer in shape.layers:
        own = layer.window or window
        layers.append(replace(layer, window=min(window, own), sinks=max(sinks, layer.sinks)))
    return KVShape(tuple(layers))


class WindowedCache(KVCache):
    """A cache with `window` and `sinks` imposed on every layer.

    A layer's own narrower window stays; without `window`, each layer has its own. The
    other arguments are those of KVCache.
    """

    stores_latents = False

    def __init__(
        self, *sizes: Any, window: int | None = None, sinks: int = 0, slack: int = 0, **named: Any
    ):
        super().__init__(*sizes, **named)
        sinks = whole_number(sinks, "The number of sinks", 0)
        self.slack = whole_number(slack, "The slack of a window", 0)
        if sinks and window is None:
            raise BadRequest(f"There are {sinks} sinks and no window; give a window as well.")
        if window is not None:
            self.shape = _with_window(self.shape, whole_number(window, "The window", 1), sinks)
        self._reach = [0] * self.batch  # the maximum length of each row since it was empty
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._passing: dict[int, list[Tensor]] = {}  # cached and new tokens, during a pass
        self._pass: dict[Any, Any] = {}  # what the layers of one pass share
        self._allocate(1)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.check_own(layer)
        sinks, ring = self._ring(layer)
        sides = ((self.keys[layer], keys), (self.values[layer], values))
        if self.step.num_tokens > 1 and self.step.length > sinks + ring:
            # These queries still see tokens that are overwritten below.
            self._passing[layer] = [torch.cat([old, new.to(self.dtype)], 2) for old, new in sides]
        rows, tokens, slots = self._places(sinks, ring)
        for cached, new in sides:
            cached[rows, :, slots] = new[rows, :, tokens].to(self.dtype)  # [N, K, D]

    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        step, spec, home = self.step, self.shape.layers[layer], self.shape.home[layer]
        if home in self._passing:
            keys, values = self._passing[home]
            slots = self._slots(home, self.keys[home].shape[2], passing=True)
            return attend_dense(step, queries, keys, values, scale, spec, slots)
        used = min(step.length, self.keys[home].shape[2])
        keys, values = self.keys[home][:, :, :used], self.values[home][:, :, :used]
        if self.shape.layers[home].window is None:  # slot s holds position s
            return attend_dense(step, queries, keys, values, scale, spec)
        if self._sees_all(home, spec.window, spec.sinks):
            return attend_dense(step, queries, keys, values, scale)
        return attend_dense(step, queries, keys, values, scale, spec, self._slots(home, used))

    def _places(self, sinks: int, ring: int) -> tuple[Tensor, Tensor, Tensor]:
        """Row, token of this pass and slot of the new tokens that stay, [N] each.

        Once per pass.
        """
        key = ("places", sinks, ring)
        if key not in self._pass:
            rows, tokens, positions = self.step.scatter()
            ends = torch.tensor(self.lengths, device=self.device)[rows]
            stay = (positions < sinks) | (positions >= ends - ring)
            rows, tokens, positions = rows[stay], tokens[stay], positions[stay]
            slots = positions.where(positions < sinks, sinks + (positions - sinks) % ring)
            self._pass[key] = rows, tokens, slots
        return self._pass[key]

    def _slots(self, layer: int, slots: int, passing: bool = False) -> Slots:
        """Return the positions of a layer's slots, computed once per pass.

        With `passing`, return the positions before the pass, then those of its tokens.
        """
        key = (slots, *self._ring(layer), passing)
        if key not in self._pass:
            step, lengths = self.step, self.step.starts if passing else self.lengths
            positions = positions_of(step.per_row(lengths), slots, *self._ring(layer))
            if passing:
                new = step.positions.where(step.real(), NOWHERE)
                positions = torch.cat([positions, new], 1)  # [B, S]
            self._pass[key] = Slots(positions, key)
        return self._pass[key]

    def _ring(self, layer: int) -> tuple[int, int]:
        """Sinks of a layer, and how many tokens it keeps after them."""
        spec = self.shape.layers[layer]
        return spec.sinks, NOWHERE if spec.window is None else spec.window + self.slack

    def _sees_all(self, home: int, window: int | None, sinks: int) -> bool:
        """Return True if the newest token sees every slot, so no mask is needed."""
        step = self.step
        same = step.num_tokens == 1 and step.uniform and self._ring(home) == (sinks, window)
        return same and all(reach == step.length for reach in self._reach)

    def tensors(self) -> list[Tensor]:
        return [*self.keys.values(), *self.values.values()]

    def nbytes_used(self) -> int:
        numbers = 0
        for i in self.shape.own:
            layer, most = self.shape.layers[i], sum(self._ring(i))
            tokens = sum(min(length, most) for length in self.lengths)
            numbers += 2 * layer.num_kv_heads * layer.head_dim * tokens
        return numbers * self.dtype.itemsize

    def most_at_once(self) -> tuple[int | None, ...]:
        """Return None (any number) until the narrowest window is full, then slack + 1."""
        full = [layer.window + layer.sinks for layer in self.shape.layers if layer.window]
        if not full:
            return (None,) * self.batch
        return tuple(max(min(full) - length, self.slack + 2) for length in self.lengths)

    def allow_rewind(self, tokens: int) -> None:
        if not any(self._reach):
            self.slack = max(self.slack, tokens)

    def _held_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        keys = self.keys[layer][:, :, : self.length]
        lengths = torch.tensor(self.lengths, device=self.device)[:, None]
        return keys.float(), positions_of(lengths, keys.shape[2], *self._ring(layer))

    def _reserve(self, lengths: tuple[int, ...], step: Step) -> None:
        self._passing, self._pass = {}, {}
        self._allocate(max(lengths))
        self._reach = [max(pair) for pair in zip(self._reach, lengths)]

    def _allocate(self, tokens: int) -> None:
        """Make room for `tokens` tokens per layer, or for its window if that is less."""
        for i in self.shape.own:
            layer, most = self.shape.layers[i], sum(self._ring(i))
            slots = self.keys[i].shape[2] if i in self.keys else 0
            if slots >= min(tokens, most):
                continue
            slots = min(doubled(max(slots, self.first_slots), tokens), most, self.capacity or most)
            size = (self.batch, layer.num_kv_heads, slots, layer.head_dim)
            for side in (self.keys, self.values):
                side[i] = grown(side.get(i), size, self.dtype, self.device)

    def _rewind(self, lengths: tuple[int, ...]) -> None:
        self._passing = {}
        layers = [(layer.window, layer.sinks) for layer in self.shape.layers if layer.window]
        for window, sinks in layers:
            for row, keep in enumerate(lengths):
                gone = max(sinks, self._reach[row] - window - self.slack)
                needed = max(sinks, keep + 1 - window)
                if keep > sinks and needed < gone:
                    raise BadRequest(
                        f"Row {row} cannot go back to {keep} tokens: a window of {window} then needs "
                        f"token {needed}, and those before {gone} were dropped; go back to at least "
                        f"{gone + window - 1}, to 0, or make the cache with more slack."
                    )
        least = min((sinks for _, sinks in layers), default=0)
        pairs = zip(lengths, self._reach)
        self._reach = [keep if keep <= least else reach for keep, reach in pairs]

    def _select(self, rows: tuple[int, ...], order: Tensor) -> None:
        self._passing = {}
        for side in (self.keys, self.values):
            side.update({i: t.index_select(0, order) for i, t in side.items()})
        self._reach = [self._reach[row] for row in rows]


def windowed_cache(
    window: int | None = None, sinks: int = 0, slack: int = 0
) -> Callable[..., WindowedCache]:
    """Return a function that makes windowed caches, for `make_cache` and `generate`."""
    return partial(WindowedCache, window=window, sinks=sinks, slack=slack)
