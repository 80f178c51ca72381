"""Calibrate each block on the outputs of the quantized blocks before it.

One pass over the unchanged model gives every layer a Hessian of full-precision inputs.
After quantization the layer gets other inputs. Here the text goes through the model
block by block: collect statistics, quantize the block, and run it again for the inputs
of the next block. So later layers can correct errors of earlier ones. This may help at
3 bits; at 4 bits no difference was measured. Source: Frantar et al., GPTQ, 2022
(section 4).

The other arguments of every block (rotary tables, masks) are recorded in one pass of
the unchanged model and used again. Cost: three passes of the calibration text instead
of one, its hidden states [tokens, E] in memory, and the Hessians of one block instead
of all. The statistics are valid for one method and format only.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.quant.calibrate import Calibration, Forward, read_through


class Replay:
    """Run the calibration text through `calibration.blocks`, one block at a time.

    Raises BadRequest if the blocks are not layers of the model in the order in which
    they run, or if they write into a KV cache and so cannot run twice.
    """

    def __init__(self, model: nn.Module, calibration: Calibration):
        self.blocks = list(calibration.blocks)
        inside = set(map(id, model.modules()))
        given = set(map(id, self.blocks))
        if len(given) < len(self.blocks) or not given <= inside:
            raise BadRequest("A block is repeated or of another model; give blocks=model.layers.")
        self.inputs: list[Tensor] = []  # [B, T, E] inputs of the next block, per batch
        self.rest: list[list[tuple[tuple, dict]]] = [[] for _ in self.blocks]
        self.last: tuple[int, Tensor | None] = (-1, None)  # index, output of the last block called
        handles = []
        for i, block in enumerate(self.blocks):
            record = partial(self._record, i)
            handles.append(block.register_forward_pre_hook(record, with_kwargs=True))
            handles.append(block.register_forward_hook(partial(self._keep, i)))
        read_through(model, calibration, handles)
        self.last = (-1, None)

    def _keep(self, index: int, module, args, out) -> None:
        self.last = (index, out[0] if isinstance(out, tuple) else out)

    def _record(self, index: int, module, args, kwargs) -> None:
        if not args or not isinstance(args[0], Tensor):
            raise BadRequest("A block gets no hidden states; leave out blocks=.")
        if any(map(_is_cache, (*args, *kwargs.values()))):
            raise BadRequest("The forward pass uses a KV cache; run it without one.")
        before, output = self.last
        if index == 0:
            self.inputs.append(args[0])
        elif before != index - 1 or output is None or not torch.equal(output, args[0]):
            raise BadRequest("The blocks are not in the order of use; give blocks=model.layers.")
        self.rest[index].append((args[1:], kwargs))

    def _call(self, index: int, batch: int) -> Tensor:
        args, kwargs = self.rest[index][batch]
        out = self.blocks[index](self.inputs[batch], *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    def forward(self, index: int) -> Forward:
        """Return a forward for `collect` that runs one block on the next batch."""
        batches = iter(range(len(self.inputs)))
        return lambda model, tokens, counts: self._call(index, next(batches))

    @torch.inference_mode()
    def advance(self, index: int) -> None:
        """Run block `index` in its present form; its outputs become the next block's inputs."""
        for batch in range(len(self.inputs)):
            self.inputs[batch] = self._call(index, batch)
        self.rest[index] = []


def _is_cache(value: object) -> bool:
    return hasattr(value, "append") or (hasattr(value, "update") and not isinstance(value, dict))
