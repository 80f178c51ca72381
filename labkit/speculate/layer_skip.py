"""Draft with the target without some of its layers; all weights are shared.

Each layer adds to one running vector, so a model can run without some layers. Most models
are not trained for that, so acceptance is low: 0.1 to 0.2 on the default model without a
third of its layers. Models trained for it ("self-speculative", "early exit") do better.
The target is not changed. The draft is a shallow copy with the same parts.
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
    """Draft with the target without the layers `skip`.

    None skips every third inner layer.
    """

    shares_cache = True

    def __init__(self, target: Decoder, skip: Sequence[int] | None = None):
        layers = range(target.config.num_layers)
        skip = layers[2:-1:3] if skip is None else skip
        self.kept = [i for i in layers if i not in skip]
        super().__init__(without_layers(target, skip), name=f"{len(skip)} layers skipped")
        self.cost = bytes_read(self.model) / bytes_read(target)

    def drafting_cache(self):
        return self.cache.of_layers(self.kept) if self.shared else self.cache


def without_layers(target: Decoder, skip: Sequence[int]) -> Decoder:
    """Return a decoder without the layers `skip` that shares all weights with the target.

    Raises BadRequest if a layer does not exist or none is left.
    """
    config = target.config
    kept = [i for i in range(config.num_layers) if i not in skip]
    if not kept or not all(0 <= i < config.num_layers for i in skip):
        raise BadRequest(
            f"The layers to skip are {list(skip)}; give some of 0 to {config.num_layers - 1}."
        )
    if config.kv_shared is not None:
        raise BadRequest("This model has layers that share a cache; use another drafter.")
    view = shell(target)
    layers: list[Any] = [shell(target.layers[i]) for i in kept]
    for place, layer in enumerate(layers):  # an attention layer stores its index in the cache
        layer.attention = shell(layer.attention)
        layer.attention.layer = place
    view.layers = nn.ModuleList(layers)
    windows = None if config.windows is None else tuple(config.windows[i] for i in kept)
    view.config = replace(config, num_layers=len(kept), windows=windows)
    view.describe()
    return view
