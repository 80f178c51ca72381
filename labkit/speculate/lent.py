"""What trained drafts share: they borrow the target's embedding and some rows of its head, and know it again.

`ids` [v] are the tokens that a draft can say, those that the target says most: on a small model the head is most of a
draft's cost (FR-Spec, Zhao et al. 2025). What is borrowed is neither trained nor stored, so a file holds only what was learnt.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.formats import quantize
from labkit.kernels import native
from labkit.kernels.native_pack import PackedMatrix
from labkit.model.config import ModelConfig
from labkit.model.decoder import Decoder
from labkit.model.native_parts import NativeLinear

MARKS = 64


class Lent(nn.Module):
    """A net with `ids`; `bind` lends it a target's embedding and head rows, `check` says whether it is the right target."""

    def __init__(self, config: ModelConfig, ids: Tensor):
        super().__init__()
        self.config = replace(config, num_layers=1, windows=None)
        self.register_buffer("ids", ids.to(torch.int32))
        self.register_buffer("mark", torch.zeros(MARKS))  # of the target, so that no other is taken for it
        self.lent: dict = {}

    def bind(self, target: Decoder) -> Lent:
        """Lend it the embedding and the head rows of `target`."""
        with torch.no_grad():
            self.lent = {"embed": target.embed_tokens, "head": head_rows(target, self.ids.long())}
            if not self.mark.any():
                self.mark.copy_(_mark(target, self.ids))
        return self

    def check(self, target: Decoder) -> None:
        """Raise BadRequest where `target` is not what the net was trained for (fewer bits are still the same model)."""
        ours, theirs = self.config, target.config
        same = (ours.hidden_size, ours.vocab_size) == (theirs.hidden_size, theirs.vocab_size)
        if same and self.mark.any():
            same = torch.cosine_similarity(self.mark, _mark(target, self.ids).to(self.mark.device), 0) > 0.95
        if not same:
            raise BadRequest(f"This draft was trained for another model than {target.name}; use one made for it by `labkit distill`.")

    def embed(self, tokens: Tensor) -> Tensor:
        return self.lent["embed"](tokens).float()

    def logits(self, states: Tensor) -> Tensor:
        """[..., E] -> [..., v], of the tokens `ids`."""
        head = self.lent["head"]
        return states @ head.T if isinstance(head, Tensor) else head(states)

    def packed(self) -> Lent:
        """The same net for drafting: INT8 on the native kernels where there are some, else as it is."""
        linears = [name for name, part in self.named_modules() if isinstance(part, nn.Linear)]
        if self.mark.device.type != "cpu" or any(self.get_submodule(name).bias is not None for name in linears) or native.why_not():
            return self
        net = copy.deepcopy(self, {id(self.lent): self.lent})
        for name in linears:
            net.set_submodule(name, _packed(self.get_submodule(name).weight))
        net.lent = self.lent | {"head": _packed(self.lent["head"])}
        return net

    def nbytes(self) -> int:
        """What a draft step reads: the net and its rows of the head."""
        head = self.lent["head"]
        held = [*self.parameters(), *self.buffers(), *([head] if isinstance(head, Tensor) else head.buffers())]
        return sum(t.numel() * t.element_size() for t in held)


def _packed(weight: Tensor) -> NativeLinear:
    return NativeLinear(PackedMatrix(quantize(weight.detach().float(), "int8_channel")))


def _mark(target: Decoder, ids: Tensor) -> Tensor:
    """A few numbers [MARKS] that tell one model's embedding from another's, and hardly change with its format."""
    some = ids.long()[torch.linspace(0, len(ids) - 1, MARKS).long()]
    rows = target.embed_tokens(some.clamp(max=target.config.vocab_size - 1)).float()
    return rows @ torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(0)).to(rows.device)


def head_rows(target: Decoder, ids: Tensor) -> Tensor:
    """Rows of the target's head [v, E] in float32, in whatever format it is held."""
    if target.config.tie_embeddings:
        return target.embed_tokens(ids).float()
    unit = torch.eye(target.config.hidden_size, device=target.device)
    return target.head(unit.to(target.dtype)).T[ids].float()
