"""Draft with the target itself in fewer bits; nothing needs training.

INT4 reads an eighth of the bytes of a float32 target, and a quarter of a bfloat16 one.
`cost` is that share. The draft is made from the target's weights and uses the native
kernels if they are available. The target is not changed. `int4_g32_min` restores the
default model almost exactly, because its checkpoint is on that grid, so nearly every
draft is accepted. `int4_g32_zp` has integer zero points and does not. When it loses: a
target that is already quantized, because a draft step then costs as much as a target
step.

A draft may know frequent tokens only, because the head is a large part of the bytes of a
small model. 8,192 of the 49,152 rows of the default model cover nearly all tokens that it
generates. Rare tokens are never drafted; the target adds them. The draft still reads
every token.

    saved bytes per step = (V - number of ids) * E * bits / 8
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
    """Draft with the target's weights in `format`.

    It drafts only the tokens `ids` [v]; None means all tokens.
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
    """Return a copy of a decoder without quantized weights, in a recipe or format."""
    if source.device.type == "cpu" and unsupported_reason(source.config, format) is None:
        return accelerate(source, format)
    packed = copy.deepcopy(source)
    quantize_model(packed, format)
    return packed


def with_head_of(model: Decoder, ids: Tensor) -> Decoder:
    """Return a decoder with logits for the tokens `ids` only, in that order.

    It shares all other parts with `model`.
    """
    view = shell(model)
    view.head = nn.Linear(model.config.hidden_size, len(ids), bias=False, device="meta")
    view.head.weight = nn.Parameter(model.head.weight.detach()[ids].clone(), requires_grad=False)
    view.config = replace(model.config, tie_embeddings=False)
    return view


def frequent_ids(target: Decoder, count: int = FREQUENT, text: str | None = None) -> Tensor:
    """Return the special ids and the most frequent ids, `count` in all, in ascending order.

    Tokens are counted in `text`. Without a text or a tokenizer, the lowest ids count as
    the most frequent, because byte-pair encoding learns frequent tokens first.
    """
    tokenizer, count = target.tokenizer, min(count, target.config.vocab_size)
    if tokenizer is None:
        return torch.arange(count)
    seen = Counter(tokenizer.encode(text) if text else ())
    frequent = [token for token, _ in seen.most_common()]
    ids = [*sorted(tokenizer.special_ids), *frequent, *range(tokenizer.vocab_size)]
    return torch.tensor(sorted(list(dict.fromkeys(ids))[:count]))
