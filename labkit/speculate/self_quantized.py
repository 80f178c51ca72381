"""The target itself in fewer bits as the drafter: nothing to train, and it agrees most of the time.

INT4 reads an eighth of a float32 target's bytes and a quarter of a bfloat16 one's, and `cost` is that share. Made from the
target's own numbers, on the native kernels where there are some; the target stays as it is. A result that depends on the
checkpoint's own grid has to say so: `int4_g32_min` gives the default model back almost exactly and so agrees almost always
there, integer zero points (`int4_g32_zp`) do not. It loses against a target that is quantised already: then a step of the
draft costs as much as one of the target.
"""

from __future__ import annotations

import copy

from torch import Tensor

from labkit.model.decoder import Decoder
from labkit.model.native_decoder import NativeDecoder, accelerate, why_not
from labkit.speculate.draft_model import DraftModel, bytes_read
from labkit.speculate.trimmed import with_head_of

FORMAT = "int4_g32_zp"


class SelfQuantized(DraftModel):
    """The target's weights in `format`: packed, on the native kernels where there are some."""

    shares_cache = True

    def __init__(self, target: Decoder, format: str = FORMAT, ids: Tensor | None = None):
        source = target.dequantized() if isinstance(target, NativeDecoder) else target
        if ids is not None:
            source = with_head_of(source, ids)
        super().__init__(in_format(source, format), name=format if ids is None else f"{format}, {len(ids):,} tokens", ids=ids)
        self.cost = bytes_read(self.model) / bytes_read(target)


def in_format(source: Decoder, format: str) -> Decoder:
    """A copy of a plain decoder in a recipe or format; the source stays as it is."""
    if source.device.type == "cpu" and why_not(source.config, format) is None:
        return accelerate(source, format)
    from labkit.quant import quantize_model

    packed = copy.deepcopy(source)
    quantize_model(packed, format)
    return packed
