"""The target itself in fewer bits as the drafter: nothing to train.

INT4 reads an eighth of a float32 target's bytes and a quarter of a bfloat16 one's, and
`cost` is that share. The draft is made from the target's own numbers, on the native
kernels if they are available; the target stays as it is. A result that depends on the
checkpoint's own grid has to say so: `int4_g32_min` gives the default model back almost
exactly and so agrees almost always there, integer zero points (`int4_g32_zp`) do not.
It loses against a target that is quantized already: then a step of the draft costs as
much as one of the target.

A draft may also know frequent tokens only: on a small model the head is a large part of
what a step reads. 8,192 of the default model's 49,152 rows cover nearly all tokens that
it generates. A rare token is never drafted, and the pass ends there with the target's
own. The draft still reads every token.

    saved = (V - kept) * E * bits / 8 of a step's bytes
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor, nn

from labkit.model.decoder import Decoder
from labkit.model.native.decoder import accelerate, unsupported_reason
from labkit.quant import quantize_model
from labkit.speculate.draft_model import DraftModel, bytes_read, shell

FORMAT = "int4_g32_zp"
FREQUENT = 8192


class SelfQuantized(DraftModel):
    """The target's weights in `format`. `ids` [v]: the only tokens it drafts.

    None: all.
    """

    shares_cache = True

    def __init__(self, target: Decoder, format: str = FORMAT, ids: Tensor | None = None):
        source = target.dequantized()
        if ids is not None:
            source = with_head_of(source, ids)
        name = format if ids is None else f"{format}, {len(ids):,} tokens"
        super().__init__(in_format(source, format), name=name, ids=ids)
        self.cost = bytes_read(self.model) / bytes_read(target)


def in_format(source: Decoder, format: str) -> Decoder:
    """Return a copy of a plain decoder in a recipe or format.

    `source` stays as it is.
    """
    if source.device.type == "cpu" and unsupported_reason(source.config, format) is None:
        return accelerate(source, format)
    packed = copy.deepcopy(source)
    quantize_model(packed, format)
    return packed


def with_head_of(model: Decoder, ids: Tensor) -> Decoder:
    """Return the model with logits for the tokens `ids` only, in that order.

    All other parts are shared with `model`.
    """
    view = shell(model)
    view.head = nn.Linear(model.config.hidden_size, len(ids), bias=False, device="meta")
    view.head.weight = nn.Parameter(model.head.weight.detach()[ids].clone(), requires_grad=False)
    view.config = replace(model.config, tie_embeddings=False)
    return view


def frequent_ids(target: Decoder, count: int = FREQUENT, text: str | None = None) -> Tensor:
    """Return `count` ids in ascending order: special ones, then the most frequent.

    Frequencies are those of `text`. Without a text, or without a tokenizer, the lowest
    ids count as the most frequent: byte-pair encoding assigns ids in the order in which
    it learned the tokens.
    """
    tokenizer, count = target.tokenizer, min(count, target.config.vocab_size)
    if tokenizer is None:
        return torch.arange(count)
    seen = Counter(tokenizer.encode(text) if text else ())
    by_frequency = [token for token, _ in seen.most_common()]
    ids = dict.fromkeys(
        [*sorted(tokenizer.special_ids), *by_frequency, *range(tokenizer.vocab_size)]
    )
    return torch.tensor(sorted(list(ids)[:count]))
