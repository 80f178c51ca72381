"""Keep only the sinks and the newest `window` tokens in each layer.

The query at position p sees the key at position s if s > p - window or s < sinks.
Tokens that no later query can see are dropped. So a layer's memory is bounded, and a
decode step costs the same at token 100 and at token 100,000.

    bytes = sum over layers of 2 * K * D * min(tokens, window + sinks) numbers

Windows are the model's own (Mistral, Gemma 3: the answer is exact) or imposed on a
model without windows. An imposed window forgets the tokens outside it, and a few sinks
prevent the output from degenerating (StreamingLLM, arXiv 2309.17453).

A prompt longer than the window may be read in one pass or in chunks: new tokens attend
to the cached tokens and to each other before anything is dropped. `rewind` raises
BadRequest if it needs a dropped token. It can always go back one token. After
`allow_rewind(n)` each layer keeps `n` more tokens (the slack), and `rewind` can go back
`n` + 1 tokens.

Slots form a ring, so no token is ever moved. The first `sinks` positions keep their
slots. A later position p is stored in slot sinks + (p - sinks) % ring, where ring =
window + slack. The position in a slot follows from the row's length, except in slots
that were overwritten before a rewind.

When it loses: the answer needs text outside an imposed window. For texts shorter than
the window it saves nothing.
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


class WindowedCache(KVCache):
    """A cache with `window` and `sinks` imposed on every layer.

    A layer's own narrower window stays. Without `window`, each layer has its own. The
    other arguments are those of KVCache.
    """

    stores_latents = False

    slack = 0  # tokens that each layer keeps besides its window and sinks

    def __init__(self, *sizes: Any, window: int | None = None, sinks: int = 0, **named: Any):
        super().__init__(*sizes, **named)
        sinks = whole_number(sinks, "The number of sinks", 0)
        if sinks and window is None:
            raise BadRequest(f"There are {sinks} sinks and no window; give a window, too.")
        if window is not None:
            window = whole_number(window, "The window", 1)
            layers = []
            for layer in self.shape.layers:
                narrow = min(window, layer.window or window)
                layers.append(replace(layer, window=narrow, sinks=max(sinks, layer.sinks)))
            self.shape = KVShape(tuple(layers))
        self._reach = [0] * self.batch  # the maximum length of each row since it was empty
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._allocate(1)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.check_own(layer)
        sinks, ring = self._ring(layer)
        sides = ((self.keys[layer], keys), (self.values[layer], values))
        if self.step.num_tokens > 1 and self.step.length > sinks + ring:
            # These queries still see tokens that are overwritten below.
            both = [torch.cat([old, new.to(self.dtype)], 2) for old, new in sides]
            self._pass["before and new", layer] = both
        rows, tokens, slots = self._places(sinks, ring)
        for cached, new in sides:
            cached[rows, :, slots] = new[rows, :, tokens].to(self.dtype)  # [N, K, D]

    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        step, spec, home = self.step, self.shape.layers[layer], self.shape.home[layer]
        if ("before and new", home) in self._pass:
            keys, values = self._pass["before and new", home]
            slots = self._slots(home, self.keys[home].shape[2], before=True)
            return attend_dense(step, queries, keys, values, scale, spec, slots)
        used = min(step.length, self.keys[home].shape[2])
        keys, values = self.keys[home][:, :, :used], self.values[home][:, :, :used]
        if self.shape.layers[home].window is None:  # slot s stores position s
            return attend_dense(step, queries, keys, values, scale, spec)
        same_band = self._ring(home) == (spec.sinks, spec.window)
        if same_band and step.num_tokens == 1 and step.uniform:
            if all(reach == step.length for reach in self._reach):  # the token sees every slot
                return attend_dense(step, queries, keys, values, scale)
        return attend_dense(step, queries, keys, values, scale, spec, self._slots(home, used))

    def _places(self, sinks: int, ring: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return row, token of this pass and slot of all tokens that stay: [N] each."""
        key = ("places", sinks, ring)
        if key not in self._pass:
            rows, tokens, positions = self.step.scatter
            ends = torch.tensor(self.lengths, device=self.device)[rows]
            stay = (positions < sinks) | (positions >= ends - ring)
            rows, tokens, positions = rows[stay], tokens[stay], positions[stay]
            slots = positions.where(positions < sinks, sinks + (positions - sinks) % ring)
            self._pass[key] = rows, tokens, slots
        return self._pass[key]

    def _slots(self, layer: int, slots: int, before: bool = False) -> Slots:
        """Return the positions of a layer's slots.

        With `before`, return the positions before this pass, then those of its tokens.
        """
        key = (slots, *self._ring(layer), before)
        if key not in self._pass:
            step, lengths = self.step, self.step.starts if before else self.lengths
            positions = positions_of(step.per_row(lengths), slots, *self._ring(layer))
            if before:
                new = step.positions.where(step.real(), NOWHERE)
                positions = torch.cat([positions, new], 1)  # [B, S]
            self._pass[key] = Slots(positions, key)
        return self._pass[key]

    def _ring(self, layer: int) -> tuple[int, int]:
        """Return the number of sinks of a layer, and of tokens that it keeps after them."""
        spec = self.shape.layers[layer]
        return spec.sinks, NOWHERE if spec.window is None else spec.window + self.slack

    def tensors(self) -> list[Tensor]:
        return [*self.keys.values(), *self.values.values()]

    def nbytes_used(self) -> int:
        sizes = ((side[0, :, 0].nbytes, sum(self._ring(i))) for i, side in self.keys.items())
        return sum(2 * size * min(n, most) for size, most in sizes for n in self.lengths)

    def most_at_once(self) -> tuple[int | None, ...]:
        """Return how many tokens fill the narrowest window, but at least slack + 2."""
        full = [layer.window + layer.sinks for layer in self.shape.layers if layer.window]
        if not full:
            return (None,) * self.batch
        return tuple(max(min(full) - length, self.slack + 2) for length in self.lengths)

    def allow_rewind(self, tokens: int) -> None:
        if not any(self._reach):
            self.slack = max(self.slack, tokens)

    def _cached_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        keys = self.keys[layer][:, :, : self.length]
        lengths = torch.tensor(self.lengths, device=self.device)[:, None]
        return keys.float(), positions_of(lengths, keys.shape[2], *self._ring(layer))

    def _reserve(self, lengths: tuple[int, ...], step: Step) -> None:
        self._allocate(max(lengths))
        self._reach = list(map(max, self._reach, lengths))

    def _allocate(self, tokens: int) -> None:
        """Make room for `tokens` tokens per layer, or for its window if smaller."""
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
        layers = [(layer.window, layer.sinks) for layer in self.shape.layers if layer.window]
        for window, sinks in layers:
            for row, keep in enumerate(lengths):
                first = max(sinks, self._reach[row] - window - self.slack)  # the oldest one left
                if keep > sinks and max(sinks, keep + 1 - window) < first:
                    raise BadRequest(
                        f"Row {row} cannot go back to {keep} tokens, because it has dropped too "
                        f"many; give 0, or at least {first + window - 1}."
                    )
        least = min((sinks for _, sinks in layers), default=0)
        pairs = zip(lengths, self._reach)
        self._reach = [keep if keep <= least else reach for keep, reach in pairs]

    def _select(self, rows: tuple[int, ...], order: Tensor) -> None:
        for side in (self.keys, self.values):
            side.update({i: t.index_select(0, order) for i, t in side.items()})
        self._reach = [self._reach[row] for row in rows]


def windowed_cache(window: int | None = None, sinks: int = 0) -> Callable[..., WindowedCache]:
    """Return a function that makes windowed caches, for `make_cache` and `generate`."""
    return partial(WindowedCache, window=window, sinks=sinks)
