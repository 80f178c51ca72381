"""The common base of trained drafts, which borrow the target's embedding and head rows.

Borrowed parts are neither trained nor stored, so a file has only the learned weights. A
draft can check whether a model is the one for which it was trained. `ids` [v] are the
tokens that it can draft: the most frequent ones of the target. Fewer tokens make it
cheaper, because the head is most of the cost of a small draft (FR-Spec, Zhao et al.
2025).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.formats import round_to_nearest
from labkit.generate.drafter import Drafter
from labkit.kernels.native import build as native
from labkit.kernels.native.packed import NativePack
from labkit.model.config import ModelConfig
from labkit.model.decoder import Decoder
from labkit.quant.linear import QuantizedLinear
from labkit.speculate.draft_model import bytes_read

MARKS = 64


class Borrower(nn.Module):
    """A net that drafts the tokens `ids` [v] with a target's embedding and head rows.

    `bind` borrows them, and `check` tests whether a target is the right one. `mark` has
    numbers that identify it.
    """

    ids: Tensor
    mark: Tensor

    def __init__(self, config: ModelConfig, ids: Tensor):
        super().__init__()
        self.config = replace(config, num_layers=1, windows=None)
        self.register_buffer("ids", ids.to(torch.int32))
        self.register_buffer("mark", torch.zeros(MARKS))
        self.borrowed: dict[str, Any] = {}

    def bind(self, target: Decoder) -> Borrower:
        """Borrow the embedding and the head rows of `target`; return self."""
        with torch.no_grad():
            head = head_rows(target, self.ids.long())
            self.borrowed = {"embed": target.embed_tokens, "head": head}
            if not self.mark.any():
                self.mark.copy_(_mark(target, self.ids))
        return self

    def check(self, target: Decoder) -> None:
        """Raise BadRequest if the net was trained for another model.

        The same model in another number format is accepted.
        """
        ours, theirs = self.config, target.config
        same = (ours.hidden_size, ours.vocab_size) == (theirs.hidden_size, theirs.vocab_size)
        if same and self.mark.any():
            mark = _mark(target, self.ids).to(self.mark.device)
            same = bool(torch.cosine_similarity(self.mark, mark, 0) > 0.95)
        if not same:
            raise BadRequest(
                f"This draft was trained for another model than {target.name}; "
                "use one made for it by `labkit distill`."
            )

    def embed(self, tokens: Tensor) -> Tensor:
        return self.borrowed["embed"](tokens).float()

    def logits(self, states: Tensor) -> Tensor:
        """Return logits of the tokens `ids` [..., v] from states [..., E]."""
        head = self.borrowed["head"]
        return states @ head.T if isinstance(head, Tensor) else head(states)

    def packed(self) -> Borrower:
        """Return a copy in INT8 for the native kernels, or the net itself if they cannot run it."""
        linears = {name: part for name, part in self.named_modules() if isinstance(part, nn.Linear)}
        biased = any(part.bias is not None for part in linears.values())
        if self.mark.device.type != "cpu" or biased or native.unsupported_reason():
            return self
        net = copy.deepcopy(self, {id(self.borrowed): self.borrowed})
        for name, part in linears.items():
            net.set_submodule(name, _packed(part.weight))
        net.borrowed = self.borrowed | {"head": _packed(self.borrowed["head"])}
        return net

    def nbytes(self) -> int:
        """Return the number of bytes that a draft step reads: the net and its head rows."""
        head = self.borrowed["head"]
        tensors = [*self.parameters(), *self.buffers()]
        tensors += [head] if isinstance(head, Tensor) else head.buffers()
        return sum(tensor.nbytes for tensor in tensors)


class TrainedDrafter(Drafter):
    """A drafter with a net that was trained on the target's hidden states.

    `packed` stores the net in INT8 if native kernels can run it.
    """

    wants_hidden = True

    def __init__(self, net: Borrower, target: Decoder, packed: bool = True):
        net.check(target)
        self.net: Any = net.bind(target)
        if packed:
            self.net = self.net.packed()
        self.ids = net.ids.long()
        self.cost = self.net.nbytes() / bytes_read(target)

    def check(self, target: Decoder) -> None:
        self.net.check(target)


def _packed(weight: Tensor) -> QuantizedLinear:
    return QuantizedLinear(NativePack(round_to_nearest(weight.detach().float(), "int8_channel")))


def _mark(target: Decoder, ids: Tensor) -> Tensor:
    """Return numbers [MARKS] that identify a target's embedding in any number format."""
    some = ids.long()[torch.linspace(0, len(ids) - 1, MARKS).long()]
    rows = target.embed_tokens(some.clamp(max=target.config.vocab_size - 1)).float()
    direction = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(0))
    return rows @ direction.to(rows.device)


def head_rows(target: Decoder, ids: Tensor) -> Tensor:
    """Return the head rows of the tokens `ids`, [v, E] in float32, from any number format."""
    if target.config.tie_embeddings:
        return target.embed_tokens(ids).float()
    unit = torch.eye(target.config.hidden_size, device=target.device)
    return target.head(unit.to(target.dtype)).T[ids].float()
