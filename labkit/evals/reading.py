"""Reading a text with a model: passages, final hidden states, and an unchanged model remembered by them.

Hidden states are E numbers a token where logits are V (576 and 49,152 in the default model): what is remembered of the
unchanged model is small, and one model in memory is enough to score it, change it in place, and score it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.quant.calibrate import device_of


@dataclass(frozen=True)
class Passage:
    id: str
    slice: str
    tokens: tuple[int, ...]
    nbytes: int  # of the scored tokens' text
    first: int = 1  # the first token that is scored; those before it are context


def cut(documents, slice: str, tokenizer, limit: int | None, length: int, overlap: int = 0) -> list[Passage]:
    """Passages of at most `length` tokens until `limit` tokens are held.

    `overlap` 0: each begins anew, and its first token is context. Else a window slides: every later passage begins with the
    last `overlap` tokens of the one before as context, and every token but a document's first is scored exactly once."""
    if not 0 <= overlap < length:
        raise BadRequest(f"Windows of {length} tokens cannot overlap by {overlap}; give 0 to {length - 1}.")
    passages, held = [], 0
    for name, text in documents:
        ids = tokenizer.encode(text)
        for start in range(0, len(ids), length - overlap):
            again = overlap if start else 0  # tokens that the passage before has scored
            piece, first = ids[start : start + length], again or 1
            if limit is not None:
                piece = piece[: limit - held + again]
            if len(piece) <= first:
                continue
            scored = len(tokenizer.decode(piece).encode()) - len(tokenizer.decode(piece[:first]).encode())
            passages.append(Passage(f"{name}:{start}", slice, tuple(piece), scored, first))
            held += len(piece) - again
        if limit is not None and held >= limit - 1:
            break
    return passages


def plain_read(model: nn.Module, tokens: Tensor) -> tuple[Tensor, nn.Module | None]:
    """(final hidden states [T, E] and the head), or (logits [T, V] and None) for a model that does not show them."""
    if hasattr(model, "hidden_states"):
        return model.hidden_states(tokens)[0], model.head
    out = model(tokens)
    return getattr(out, "logits", out)[0], None


class Remembered:
    """The unchanged model's answers: log-probabilities of a passage, from stored hidden states and its own head."""

    def __init__(
        self, model: nn.Module, passages: Sequence[Passage], progress: Callable[[str], None] = lambda line: None
    ):
        self.states: dict[str, Tensor] = {}
        self.head = None
        for passage in passages:
            progress(passage.id)
            with torch.inference_mode():
                hidden, self.head = plain_read(model, torch.tensor([passage.tokens], device=device_of(model)))
            self.states[passage.id] = hidden  # logits themselves where the model shows no hidden states

    def __call__(self, passage: Passage) -> tuple[Tensor, nn.Module | None]:
        if passage.id not in self.states:
            raise BadRequest(f"The reference was not run on passage {passage.id}; build it from the same passages.")
        return self.states[passage.id], self.head


def log_probs(states: Tensor, head: nn.Module | None) -> Tensor:
    logits = states if head is None else head(states)
    return logits.float().log_softmax(-1)  # [t, V]
