"""The target without some of its layers as the drafter: all weights shared.

Each layer adds to one running vector, so a model can run with some layers left out. It
was not trained for that, and acceptance is low (0.1 to 0.2 on the default model without
a third of its layers). Trained for it ("self-speculative", "early exit") it is better.
The target is not changed: the draft is a shallow copy around the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from labkit.errors import BadRequest
from labkit.model.decoder import Decoder
from labkit.speculate.draft_model import DraftModel, bytes_read, shell


class LayerSkip(DraftModel):
    """The target without the layers `skip`.

    None leaves out every third of the inner ones.
    """

    shares_cache = True

    def __init__(self, target: Decoder, skip: Sequence[int] | None = None):
        skip = range(2, target.config.num_layers - 1, 3) if skip is None else skip
        self.kept = [i for i in range(target.config.num_layers) if i not in set(skip)]
        super().__init__(without_layers(target, skip), name=f"{len(skip)} layers skipped")
        self.cost = bytes_read(self.model) / bytes_read(target)

    def drafting_cache(self):
        return self.cache.of_layers(self.kept) if self.shared else self.cache


def without_layers(target: Decoder, skip: Sequence[int]) -> Decoder:
    """Return the target's other layers as a decoder of its own that shares every weight."""
    config = target.config
    kept = [i for i in range(config.num_layers) if i not in set(skip)]
    if not kept or not all(0 <= i < config.num_layers for i in skip):
        raise BadRequest(
            f"The layers to skip are {list(skip)} of {config.num_layers}; "
            f"give some of 0 to {config.num_layers - 1}, not all."
        )
    if config.kv_shared is not None:
        raise BadRequest("Layers of this model read each other's caches; use another drafter.")
    view = shell(target)
    layers: list[Any] = [shell(target.layers[i]) for i in kept]
    for place, layer in enumerate(layers):  # a layer knows its place in the cache
        layer.attention = shell(layer.attention)
        layer.attention.layer = place
    view.layers = nn.ModuleList(layers)
    windows = None if config.windows is None else tuple(config.windows[i] for i in kept)
    view.config = replace(config, num_layers=len(kept), windows=windows)
    view.describe()
    return view
