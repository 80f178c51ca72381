"""Two ways to choose which tokens a cache forgets; an example of adding your own.

    KeyNorm    a key of small norm is kept: those get most of the attention, in trained models (arXiv 2406.11430)
    Observed   a token is kept for the attention that it got so far, summed over heads and queries (H2O, arXiv 2306.14048)

To add one: a class with a `score`, and a line in `CACHES`; the tests of all eviction methods then run on it.
KeyNorm costs one pass over the keys, Observed a second softmax of the scores. Both lose where the question comes after
the text: what nobody has asked for yet gets no attention. Neither knows more than it saw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.cache.evicting import EvictingCache
from labkit.cache.step import visible


class KeyNorm(EvictingCache):
    def score(self, layer: int, queries: Tensor, scale: float | None) -> Tensor:
        return -self.keys[layer].float().norm(dim=-1).mean(1)  # [B, K, S, D] -> [B, S]


class Observed(EvictingCache):
    def most_at_once(self) -> tuple[int | None, ...]:
        return (1,) * self.batch  # what refused tokens looked at would stay in the notes

    def score(self, layer: int, queries: Tensor, scale: float | None) -> Tensor:
        keys, spec, (B, H, T, D) = self.keys[layer].float(), self.shape.layers[layer], queries.shape
        grouped = queries.float().reshape(B, keys.shape[1], -1, D) * (D**-0.5 if scale is None else scale)
        scores = (grouped @ keys.mT).view(B, H, T, -1)  # [B, H, T, S]
        seen = visible(self.step.positions, self.positions[layer], spec.window, spec.sinks)[:, None]
        weights = scores.masked_fill(~seen, torch.finfo(torch.float32).min).softmax(-1)
        real = torch.arange(T, device=self.device) < torch.tensor(self.step.counts, device=self.device)[:, None]
        self.notes[layer] += (weights * real[:, None, :, None]).sum((1, 2))  # a note stays with its token
        return self.notes[layer]
