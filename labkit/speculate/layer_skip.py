"""The target without some of its layers as the drafter: no byte more, every weight shared.

Each layer adds to one running vector, so a text can be read with some left out; nobody trained it for that, and the
acceptance is low (0.1 to 0.2 on the default model without a third of its layers). Trained ("self-speculative", "early
exit") it is better. The target is not changed: the draft is another shell around the same parts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from labkit.errors import BadRequest
from labkit.model.decoder import Decoder
from labkit.model.native_decoder import NativeDecoder
from labkit.speculate.draft_model import DraftModel, bytes_read, shell


class LayerSkip(DraftModel):
    """The target without the layers `skip`; None leaves out every third of the inner ones."""

    shares_cache = True

    def __init__(self, target: Decoder, skip: Sequence[int] | None = None):
        skip = range(2, target.config.num_layers - 1, 3) if skip is None else skip
        self.kept = [i for i in range(target.config.num_layers) if i not in set(skip)]
        super().__init__(without_layers(target, skip), name=f"{len(skip)} layers skipped")
        self.cost = bytes_read(self.model) / bytes_read(target)

    def _drafting_cache(self):
        """Of the target's cache the layers that are kept: the same tensors, seen by fewer layers, with lengths of its own."""
        if self._shared is None:
            return self.cache
        view = copy.copy(self._shared)
        view.shape = self.model.config.kv_shape
        view.keys, view.values = ([side[i] for i in self.kept] for side in (view.keys, view.values))
        view._home = list(range(len(self.kept)))
        return view


def without_layers(target: Decoder, skip: Sequence[int]) -> Decoder:
    """The target's other layers as a decoder of its own, sharing every weight."""
    config = target.config
    wrong = [i for i in skip if not 0 <= i < config.num_layers]
    kept = [i for i in range(config.num_layers) if i not in set(skip)]
    if wrong or not kept:
        raise BadRequest(f"The layers to skip are {list(skip)} of {config.num_layers}; give some of 0 to {config.num_layers - 1}, not all.")
    if config.kv_shared is not None:
        raise BadRequest("Layers of this model read each other's caches, so none can be left out; use another drafter.")
    view = shell(target)
    layers = []
    for place, i in enumerate(kept):  # a layer knows its place in the cache, so each gets a new shell
        layer = shell(target.layers[i])
        layer.attention = shell(layer.attention)
        layer.attention.layer = place
        layers.append(layer)
    view.layers = nn.ModuleList(layers)
    windows = None if config.windows is None else tuple(config.windows[i] for i in kept)
    view.config = replace(config, num_layers=len(kept), windows=windows)
    if isinstance(view, NativeDecoder):
        view._describe()
    return view
