"""Which position lies in which slot of a windowed layer: arithmetic on lengths, without a tensor.

The first `sinks` positions keep their slots for ever; position p behind them lies in slot sinks + (p - sinks) % ring, so
the newest `ring` positions are held and nothing is moved. A slot's content follows from the row's length alone, which
is why reordering rows and going back need no further state, except for what has been overwritten already: `lost`.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOWHERE = 2**62  # the position of a slot that holds nothing: no query sees it


def slot_of(positions: Tensor, sinks: int, ring: int) -> Tensor:
    """The slot of each position."""
    return torch.where(positions < sinks, positions, sinks + (positions - sinks) % ring)


def positions_of(lengths: Tensor, slots: int, sinks: int, ring: int) -> Tensor:
    """Lengths [B] -> the position that each of `slots` slots holds [B, slots]."""
    slot = torch.arange(slots, device=lengths.device)
    last = lengths[:, None] - 1
    newest = last - (last - slot) % ring  # the largest position up to the last that falls into this slot
    found = torch.where(slot < sinks, slot, newest)
    return torch.where((found <= last) & (found >= slot.clamp(max=sinks)), found, NOWHERE)


def lost(reach: int, sinks: int, ring: int) -> int:
    """Positions from `sinks` to this one (excluded) were overwritten in a row that once held `reach` tokens."""
    return max(sinks, reach - ring)
