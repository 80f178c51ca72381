"""Passages of text, and the output of the unchanged model on them.

One model in memory is enough: read the passages, change the model in place, and compare. The
output is stored as final hidden states, which are E numbers per token. Logits would be V numbers
per token. In the default model E is 576 and V is 49,152.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.lab.texts import LANGUAGES, evaluation_documents
from labkit.quant.calibrate import device_of

SLICES = ("code", "prose", *LANGUAGES[1:])


@dataclass(frozen=True)
class Passage:
    """Tokens of one text. Those before `first` are context; the others are scored."""

    id: str
    slice: str
    tokens: tuple[int, ...]
    nbytes: int  # of the scored tokens' text
    first: int = 1


def cut(
    documents: Iterable, slice: str, tokenizer, limit: int | None, length: int, overlap: int = 0
) -> list[Passage]:
    """Cut (name, text) documents into passages of up to `length` tokens, `limit` tokens in all.

    With `overlap` 0, the first token of each passage is its context. Otherwise, each later
    passage of a document starts with the last `overlap` tokens of the previous one as
    context, so every token except the document's first is scored exactly once.
    """
    if not 0 <= overlap < length:
        allowed = f"0 to {length - 1}"
        raise BadRequest(f"Passages of {length} tokens overlap by {overlap}; give {allowed}.")
    passages, total = [], 0
    for name, text in documents:
        ids = tokenizer.encode(text)
        for start in range(0, len(ids), length - overlap):
            known = overlap if start else 0  # tokens that the previous passage scores
            piece, first = ids[start : start + length], known or 1
            if limit is not None:
                piece = piece[: limit - total + known]
            if len(piece) > first:
                nbytes = sum(tokenizer.byte_counts(piece)[first:])
                passages.append(Passage(f"{name}:{start}", slice, tuple(piece), nbytes, first))
                total += len(piece) - known
        if limit is not None and total >= limit - 1:
            break
    return passages


def joined(tokenizer, slice: str, limit: int | None, length: int, first: int) -> list[Passage]:
    """Join the documents of a slice and cut them into passages of exactly `length` tokens.

    `limit` is the number of tokens to use; None uses all. Raises BadRequest if they are
    fewer than one passage.
    """
    ids: list[int] = []
    for document in evaluation_documents(slice):
        if limit is None or len(ids) < limit:
            ids += tokenizer.encode(document.text + "\n\n")
    ids, passages = ids[:limit], []
    for start in range(0, len(ids) - length + 1, length):
        piece, name = ids[start : start + length], f"{slice}:{len(passages)}"
        nbytes = sum(tokenizer.byte_counts(piece)[first:])
        passages.append(Passage(name, slice, tuple(piece), nbytes, first))
    if not passages:
        raise BadRequest(f"A passage has {length} tokens, more than {len(ids)}; raise the limit.")
    return passages


def plain_read(model: nn.Module, tokens: Tensor) -> tuple[Tensor, nn.Module | None]:
    """Return the final hidden states [T, E] and the head of a model.

    For a model without `hidden_states`, return logits [T, V] and None.
    """
    if hasattr(model, "hidden_states"):
        return model.hidden_states(tokens)[0], model.head
    out = model(tokens)
    return getattr(out, "logits", out)[0], None


class Remembered:
    """The output of the unchanged model on passages.

    Call it with a passage to get the hidden states and the head, as `plain_read` returns
    them. Raises BadRequest for a passage that was not read.
    """

    def __init__(self, model, passages: Sequence[Passage], progress: Callable = lambda id: None):
        self.states: dict[str, Tensor] = {}
        self.head = None
        for passage in passages:
            progress(passage.id)
            tokens = torch.tensor([passage.tokens], device=device_of(model))
            with torch.inference_mode():
                self.states[passage.id], self.head = plain_read(model, tokens)

    def __call__(self, passage: Passage) -> tuple[Tensor, nn.Module | None]:
        if passage.id not in self.states:
            advice = "build it from the same passages"
            raise BadRequest(f"The reference was not run on passage {passage.id}; {advice}.")
        return self.states[passage.id], self.head


def log_probs(states: Tensor, head: nn.Module | None) -> Tensor:
    """Return log-probabilities [t, V] in float32 from hidden states, or from logits if head is None."""
    return (states if head is None else head(states)).float().log_softmax(-1)
