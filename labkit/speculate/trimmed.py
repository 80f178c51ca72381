"""A draft that can only say frequent tokens: a small model's head is a large part of what a step reads.

Of the default model's 49,152 rows of the head, 8,192 cover nearly all that it says; a rare token is refused by nobody, it
is just never drafted, and the pass ends there with the target's own. The draft still reads every token.

    saved = (V - kept) * E * bits / 8 of a step's bytes          c falls by that share where bytes decide
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from labkit.model.decoder import Decoder
from labkit.speculate.draft_model import shell

FREQUENT = 8192


def with_head_of(model: Decoder, ids: Tensor) -> Decoder:
    """The model with logits for the tokens `ids` only, in that order; everything else is shared."""
    view = shell(model)
    view.head = nn.Linear(model.config.hidden_size, len(ids), bias=False, device="meta")
    view.head.weight = nn.Parameter(model.head.weight.detach()[ids].clone(), requires_grad=False)
    view.config = replace(model.config, tie_embeddings=False)
    return view


def frequent_ids(target: Decoder, count: int = FREQUENT) -> Tensor:
    """The `count` tokens that are most frequent in the training text, and all special ones, as ascending ids.

    Without a tokenizer: the first ones."""
    most = target.config.vocab_size
    if target.tokenizer is None:
        return torch.arange(min(count, most))
    return _frequent(target.tokenizer, min(count, most, target.tokenizer.vocab_size))


@lru_cache(maxsize=4)
def _frequent(tokenizer, count: int) -> Tensor:
    from labkit.texts import training_text

    seen = Counter()
    for kind in ("code", "prose"):
        seen.update(tokenizer.encode(training_text(kind, characters=500_000)))
    ids = list(tokenizer.special_ids)
    ids += [token for token, _ in seen.most_common() if token not in tokenizer.special_ids]
    ids += [token for token in range(tokenizer.vocab_size) if token not in set(ids)] if len(ids) < count else []
    return torch.tensor(sorted(ids[:count]))
