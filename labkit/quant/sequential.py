"""Layer by layer: each block is calibrated on what the blocks before it give *once they are quantised*.

One pass over the unchanged model gives every layer a Hessian of inputs that it will never see again. Here the text is
taken through the model block by block: collect on the outputs so far, quantise the block, run it again for the next one.
A later layer then makes up for what the earlier ones lost, which may pay at 3 bits; at 4 no difference was seen.
Source: Frantar et al., GPTQ, 2022 (section 4: one block in memory at a time, its inputs from the quantised ones).

Every block's further arguments (rotary tables, masks) are noted in one pass of the unchanged model and given again.
Cost: three passes of the calibration text instead of one, and its hidden states [tokens, E] in memory; the Hessians of
one block at a time instead of all. The statistics belong to one method and format and cannot be shared with another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from labkit.errors import BadRequest
from labkit.quant.calibrate import Calibration, read_through


class Replay:
    """The calibration text on its way through `blocks`, which call one another in this order."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], calibration: Calibration, forward: Callable | None = None
    ):
        self.blocks = list(blocks)
        inside = set(map(id, model.modules()))
        if len(set(map(id, self.blocks))) < len(self.blocks) or not all(id(block) in inside for block in self.blocks):
            raise BadRequest("Each block must be a layer of this very model, given once; pass its layers in order, as in blocks=model.layers.")
        self.inputs: list[torch.Tensor] = []  # [B, T, E] of every batch, of the block that is next
        self.rest: list[list[tuple[tuple, dict]]] = [[] for _ in self.blocks]
        self.handed: tuple[int, object] = (-1, None)  # the block that was called last, and what it gave
        handles = [b.register_forward_pre_hook(self._note(i), with_kwargs=True) for i, b in enumerate(self.blocks)]
        handles += [b.register_forward_hook(self._keep(i)) for i, b in enumerate(self.blocks)]
        read_through(model, calibration, forward, handles)
        self.handed = (-1, None)

    def _keep(self, index: int) -> Callable:
        def keep(module, args, out):
            self.handed = (index, out[0] if isinstance(out, tuple) else out)

        return keep

    def _note(self, index: int) -> Callable:
        def note(module, args, kwargs):
            if not args or not isinstance(args[0], torch.Tensor):
                raise BadRequest("A block is called without its hidden states first; calibrate all layers in one pass.")
            if any(hasattr(value, "append") or hasattr(value, "update") and not isinstance(value, dict)
                   for value in (*args, *kwargs.values())):
                raise BadRequest(
                    "The blocks write into a KV cache and cannot be run twice; pass a forward without a cache, or no blocks."
                )
            before, given = self.handed
            if index == 0:
                self.inputs.append(args[0])
            elif before != index - 1 or not (given is args[0] or torch.equal(given, args[0])):
                raise BadRequest(
                    "The blocks do not hand on to one another in this order; pass the model's layers as they are called, as in blocks=model.layers."
                )
            self.rest[index].append((args[1:], kwargs))

        return note

    def _call(self, index: int, batch: int) -> torch.Tensor:
        args, kwargs = self.rest[index][batch]
        out = self.blocks[index](self.inputs[batch], *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    def forward(self, index: int) -> Callable:
        """What `collect` runs in place of the whole model: one block, batch after batch."""
        turn = iter(range(len(self.inputs)))
        return lambda model, tokens, counts: self._call(index, next(turn))

    def advance(self, index: int) -> None:
        """Through block `index` as it is by now."""
        with torch.inference_mode():
            for batch in range(len(self.inputs)):
                self.inputs[batch] = self._call(index, batch)
        self.rest[index] = []
