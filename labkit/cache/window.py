"""The windowed cache: each layer keeps its sinks and its newest `window` tokens, whatever the text's length.

The query at position p sees the key at s when s > p - window or s < sinks. What no later query can see is dropped, so a
layer's memory is bounded, and a step of decode costs the same at token 100 and at token 100,000.

    bytes = sum over layers of 2 * K * D * min(tokens, window + sinks) numbers

Windows are the model's own (Mistral, Gemma 3: then the answer is exact) or imposed on a model without them: a few sinks
then keep it from collapsing (StreamingLLM, arXiv 2309.17453), but what left the window is forgotten. `rerotate` gives
sinks the positions that they have in the cache instead of their own, as that paper does, so that no distance is ever
larger than the window. A prompt longer than the window may come in one pass or in chunks: new tokens attend to what was
held and to each other before anything is dropped. Going back is refused where it would need what was dropped;
`slack` more tokens are kept for those who rewind (rejected drafts): slack + 1 tokens back are always possible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from labkit.cache.contract import KVCache
from labkit.cache.ring import NOWHERE, lost, positions_of, slot_of
from labkit.cache.rotation import check_frequencies, cos_sin, turn
from labkit.cache.step import Step, attend_dense, visible
from labkit.errors import BadRequest, whole_number
from labkit.plan.memory import KVShape

FIRST_SLOTS = 256


class WindowedCache(KVCache):
    """`window`, `sinks`: imposed on every layer (an own narrower window of a layer stays); without `window`, each
    layer has its own. `rerotate` needs `frequencies` [D/2], the radians a position by which the model turns keys."""

    def __init__(self, shape: KVShape, batch: int = 1, capacity: int | None = None, dtype: torch.dtype = torch.float32,
                 device: str | torch.device = "cpu", window: int | None = None, sinks: int = 0, slack: int = 0,
                 rerotate: bool = False, frequencies: Tensor | None = None):  # fmt: skip
        super().__init__(shape, batch, capacity, dtype, device)
        sinks, slack = whole_number(sinks, "The number of sinks", 0), whole_number(slack, "The slack of a window", 0)
        if sinks and window is None:
            raise BadRequest(f"{sinks} sinks and no window: sinks stay beside a window; give one.")
        if window is not None:
            window = whole_number(window, "The window", 1)
            layers = (replace(s, window=window if s.window is None else min(window, s.window), sinks=max(sinks, s.sinks))
                      for s in shape.layers)  # fmt: skip
            self.shape = shape = KVShape(tuple(layers))
        if any(layer.latent_dim is not None for layer in shape.layers):
            raise BadRequest("The latent of an MLA layer has no window here; make a contiguous cache for this model.")
        if rerotate:
            check_frequencies(frequencies, shape)
        self.slack, self.frequencies = slack, frequencies if rerotate else None
        self._home = [i if layer.shared_with is None else layer.shared_with for i, layer in enumerate(shape.layers)]
        self._reach = [0] * self.batch  # the most tokens a row held since it was empty
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._passing: dict[int, tuple[Tensor, Tensor]] = {}  # held and new tokens together, in a pass of many
        self._allocate(FIRST_SLOTS)

    def _ring(self, layer: int) -> int:
        """Tokens behind the sinks that the layer keeps; without a window, more than there can be."""
        window = self.shape.layers[layer].window
        return NOWHERE if window is None else window + self.slack

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if self._home[layer] != layer:
            raise ValueError(f"Layer {layer} reads the cache of layer {self._home[layer]}; it has nothing to append.")
        step, sinks, ring = self.step, self.shape.layers[layer].sinks, self._ring(layer)
        if step.num_tokens > 1 and step.length > sinks + ring:  # the oldest are needed once more and then dropped
            both = ((self.keys, keys), (self.values, values))
            self._passing[layer] = tuple(torch.cat([t[layer], new.to(self.dtype)], 2) for t, new in both)
        if step.uniform:
            start, end = step.starts[0], step.starts[0] + step.num_tokens
            parts = [(start, min(end, sinks)), (max(start, sinks, end - ring), end)]  # what stays: sinks, and the newest
            for first, last in parts:
                if first < last:
                    part = slice(first - start, last - start)
                    slots = slot_of(torch.arange(first, last, device=self.device), sinks, ring)
                    at = slice(first, last) if last <= sinks + ring else slots
                    self.keys[layer][:, :, at] = keys[:, :, part].to(self.dtype)
                    self.values[layer][:, :, at] = values[:, :, part].to(self.dtype)
        else:
            rows, tokens, positions = step.scatter()  # [N] each
            ends = self._tensor(self.lengths)[rows]
            stay = (positions < sinks) | (positions >= ends - ring)
            rows, tokens, slots = rows[stay], tokens[stay], slot_of(positions[stay], sinks, ring)
            self.keys[layer][rows, :, slots] = keys[rows, :, tokens].to(self.dtype)  # [N, K, D]
            self.values[layer][rows, :, slots] = values[rows, :, tokens].to(self.dtype)

    def attend(self, layer: int, queries: Tensor, scale: float | None = None) -> Tensor:
        step, spec, home = self.step, self.shape.layers[layer], self._home[layer]
        held, ring = self.shape.layers[home], self._ring(home)
        turned = self.frequencies is not None and spec.window is not None and step.length > spec.window + spec.sinks
        if home in self._passing:
            keys, values = self._passing[home]
            before = positions_of(self._tensor(step.starts), self.keys[home].shape[2], held.sinks, ring)
            real = torch.arange(step.num_tokens, device=self.device) < self._tensor(step.counts)[:, None]
            positions = torch.cat([before, step.positions.where(real, NOWHERE)], 1)  # [B, S]
            name = ("passing", held.sinks, ring)
        else:
            slots = min(step.length, self.keys[home].shape[2])
            keys, values = self.keys[home][:, :, :slots], self.values[home][:, :, :slots]
            if held.window is None:  # slot s holds position s
                return attend_dense(step, queries, keys, values, scale=scale, window=spec.window, sinks=spec.sinks)
            all_seen = step.num_tokens == 1 and step.uniform and ring == spec.window and spec.sinks == held.sinks
            if all_seen and not turned and all(reach == step.length for reach in self._reach):
                return attend_dense(step, queries, keys, values, scale=scale)
            positions = positions_of(self._tensor(self.lengths), slots, held.sinks, ring)
            name = ("held", slots, held.sinks, ring)
        if turned:
            return self._attend_rerotated(spec, queries, keys, values, positions, scale)
        return attend_dense(step, queries, keys, values, scale=scale, window=spec.window, sinks=spec.sinks,
                            key_positions=positions, name=name)  # fmt: skip

    def _tensor(self, numbers: tuple[int, ...]) -> Tensor:
        return torch.tensor(numbers, device=self.device)

    def _attend_rerotated(self, spec, queries, keys, values, positions, scale) -> Tensor:
        """Sinks at the distance that they have in the cache. Turning a sink's key on by d positions is turning the
        query back by d; d is how many tokens lie between the sinks and the query's window."""
        B, H, T, D = queries.shape
        K, G, S = keys.shape[1], queries.shape[1] // keys.shape[1], keys.shape[2]
        gap = (self.step.positions + 1 - spec.window - spec.sinks).clamp(min=0)  # [B, T]
        q = queries.float() * (D**-0.5 if scale is None else scale)
        cos, sin = cos_sin(-gap[:, None], self.frequencies)  # [B, 1, T, D/2]
        back = turn(q, cos, sin)
        near, far = ((x.reshape(B, K, G * T, D) @ keys.float().mT).view(B, K, G, T, S) for x in (q, back))
        is_sink = (positions < spec.sinks)[:, None, None, None]  # [B, 1, 1, 1, S]
        seen = visible(self.step.positions, positions, spec.window, spec.sinks)[:, None, None]  # [B, 1, 1, T, S]
        lowest = torch.finfo(torch.float32).min
        weights = torch.where(is_sink, far, near).masked_fill(~seen, lowest).softmax(-1)
        out = weights.view(B, K, G * T, S) @ values.float()
        return out.view(B, H, T, D).to(queries.dtype)

    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for side in (self.keys, self.values) for t in side.values())

    def nbytes_used(self) -> int:
        held = ((layer, layer.sinks + self._ring(i)) for i, layer in enumerate(self.shape.layers) if self._home[i] == i)
        numbers = sum(2 * layer.num_kv_heads * layer.head_dim * min(length, most)
                      for layer, most in held for length in self.lengths)  # fmt: skip
        return numbers * self.dtype.itemsize

    def most_at_once(self) -> tuple[int | None, ...]:
        """Any number until the narrowest window is full; then as many as `slack` can bring back, and one."""
        full = min((layer.window + layer.sinks for layer in self.shape.layers if layer.window is not None), default=None)
        return tuple(None if full is None else max(full - length, self.slack + 2) for length in self.lengths)

    def _reserve(self, lengths: tuple[int, ...], step: Step) -> None:
        self._passing = {}
        self._allocate(max(lengths))
        self._reach = [max(pair) for pair in zip(self._reach, lengths)]

    def _allocate(self, tokens: int) -> None:
        """Slots for `tokens` tokens in each layer, or as many as its window needs; doubled, so that growth is rare."""
        with torch.inference_mode(False), torch.no_grad():
            for i, layer in enumerate(self.shape.layers):
                if self._home[i] != i:
                    continue
                have, most = self.keys[i].shape[2] if i in self.keys else 0, layer.sinks + self._ring(i)
                if have >= min(tokens, most):
                    continue
                slots = min(most, max(FIRST_SLOTS, 2 * have, tokens), self.capacity or most)
                for side in (self.keys, self.values):
                    grown = torch.zeros(self.batch, layer.num_kv_heads, slots, layer.head_dim,
                                        dtype=self.dtype, device=self.device)  # fmt: skip
                    if have:
                        grown[:, :, :have] = side[i]
                    side[i] = grown

    def _rewind(self, lengths: tuple[int, ...]) -> None:
        self._passing = {}
        for i, layer in enumerate(self.shape.layers):
            for row, keep in enumerate(lengths):
                gone = lost(self._reach[row], layer.sinks, self._ring(i)) if layer.window is not None else 0
                needed = max(layer.sinks, keep + 1 - layer.window) if layer.window is not None else 0
                if keep > layer.sinks and needed < gone:
                    raise BadRequest(
                        f"Row {row} cannot go back to {keep} tokens: layer {i}'s window of {layer.window} then needs token "
                        f"{needed}, and those before {gone} were dropped; go back to at least {gone + layer.window - 1}, "
                        "to 0, or make the cache with more slack."
                    )
        least = min((layer.sinks for layer in self.shape.layers if layer.window is not None), default=0)
        self._reach = [keep if keep <= least else reach for keep, reach in zip(lengths, self._reach)]

    def _select(self, rows: tuple[int, ...]) -> None:
        self._passing, order = {}, torch.tensor(rows, device=self.device)
        for side in (self.keys, self.values):
            side.update({i: t.index_select(0, order) for i, t in side.items()})
        self._reach = [self._reach[row] for row in rows]


def windowed_cache(window: int | None = None, sinks: int = 0, slack: int = 0, rerotate: bool = False,
                   frequencies: Tensor | None = None) -> Callable[..., WindowedCache]:  # fmt: skip
    """A maker of such caches, for `make_cache`, `generate` and the registry."""

    def make(shape: KVShape, batch: int = 1, capacity: int | None = None, dtype=torch.float32, device="cpu"):
        return WindowedCache(shape, batch, capacity, dtype, device, window, sinks, slack, rerotate, frequencies)

    return make
