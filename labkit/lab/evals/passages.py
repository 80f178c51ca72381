"""Passages of text, what a model reads in them, and an unchanged model remembered by that.

Final hidden states are E numbers per token, logits are V (576 and 49,152 in the default model).
Keeping the hidden states of the unchanged model is cheap, so one model in memory is enough: read
the passages, change the model in place, and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.lab.texts import EVALUATION_SLICES, LANGUAGES, evaluation_documents
from labkit.quant.calibrate import device_of

SLICES = ("code", "prose", *LANGUAGES[1:])


@dataclass(frozen=True)
class Passage:
    """Tokens of one text. Those before `first` are context, the others are scored."""

    id: str
    slice: str
    tokens: tuple[int, ...]
    nbytes: int  # of the scored tokens' text
    first: int = 1


def check_slices(names: Sequence[str]) -> tuple[str, ...]:
    """Validate slice names; the error lists the available ones."""
    allowed = (*EVALUATION_SLICES, *LANGUAGES[1:])
    unknown = [name for name in names if name not in allowed] or [""] * (not names)
    if unknown:
        raise BadRequest(
            f"The task text has no slice {unknown[0]!r}; choose from {', '.join(allowed)}."
        )
    return tuple(names)


def cut(
    documents: Iterable[tuple[str, str]],
    slice: str,
    tokenizer,
    limit: int | None,
    length: int,
    overlap: int = 0,
) -> list[Passage]:
    """Cut (name, text) documents into passages of up to `length` tokens, `limit` tokens in all.

    With `overlap` 0 each passage starts anew and its first token is context. Otherwise a window
    slides: each later passage of a document starts with the last `overlap` tokens of the one
    before as context, and every token but the document's first is scored exactly once.
    """
    if not 0 <= overlap < length:
        raise BadRequest(
            f"Windows of {length} tokens cannot overlap by {overlap}; give 0 to {length - 1}."
        )
    passages, total = [], 0
    for name, text in documents:
        ids = tokenizer.encode(text)
        for start in range(0, len(ids), length - overlap):
            known = overlap if start else 0  # tokens that the passage before has scored
            piece, first = ids[start : start + length], known or 1
            if limit is not None:
                piece = piece[: limit - total + known]
            if len(piece) > first:
                nbytes = scored_bytes(tokenizer, piece, first)
                passages.append(Passage(f"{name}:{start}", slice, tuple(piece), nbytes, first))
                total += len(piece) - known
        if limit is not None and total >= limit - 1:
            break
    return passages


def joined(tokenizer, slice: str, limit: int | None, length: int, first: int) -> list[Passage]:
    """Join the documents of a slice and cut them into passages of exactly `length` tokens.

    Raises BadRequest if `limit` tokens of the slice make no such passage.
    """
    ids: list[int] = []
    for document in evaluation_documents(slice):
        if limit is None or len(ids) < limit:
            ids += tokenizer.encode(document.text + "\n\n")
    ids = ids[:limit]
    pieces = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    if not pieces:
        raise BadRequest(
            f"{len(ids)} tokens of {slice} make no passage of {length}; raise the limit to {length}."
        )
    return [
        Passage(f"{slice}:{i}", slice, tuple(piece), scored_bytes(tokenizer, piece, first), first)
        for i, piece in enumerate(pieces)
    ]


def scored_bytes(tokenizer, tokens: Sequence[int], first: int) -> int:
    """Return the bytes of the text behind the first `first` tokens."""
    whole, context = tokenizer.decode(tokens), tokenizer.decode(tokens[:first])
    return len(whole.encode()) - len(context.encode())


def plain_read(model: nn.Module, tokens: Tensor) -> tuple[Tensor, nn.Module | None]:
    """Return the final hidden states [T, E] and the head, or logits [T, V] and None.

    Logits are returned for a model that does not show its hidden states.
    """
    if hasattr(model, "hidden_states"):
        return model.hidden_states(tokens)[0], model.head
    out = model(tokens)
    return getattr(out, "logits", out)[0], None


class Remembered:
    """The unchanged model's reading of passages; call it with a passage to get states and head."""

    def __init__(
        self,
        model: nn.Module,
        passages: Sequence[Passage],
        progress: Callable[[str], object] = lambda line: None,
    ):
        self.states: dict[str, Tensor] = {}
        self.head = None
        for passage in passages:
            progress(passage.id)
            tokens = torch.tensor([passage.tokens], device=device_of(model))
            with torch.inference_mode():
                self.states[passage.id], self.head = plain_read(model, tokens)

    def __call__(self, passage: Passage) -> tuple[Tensor, nn.Module | None]:
        if passage.id not in self.states:
            raise BadRequest(
                f"The reference was not run on passage {passage.id}; build it from the same passages."
            )
        return self.states[passage.id], self.head


def log_probs(states: Tensor, head: nn.Module | None) -> Tensor:
    """Return log-probabilities [t, V] in float32 of hidden states, or of logits if head is None."""
    logits = states if head is None else head(states)
    return logits.float().log_softmax(-1)
