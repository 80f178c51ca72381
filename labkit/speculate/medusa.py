"""Draft with Medusa heads, which predict several tokens at once from one true state.

    head k:  rows · (h + silu(W_k h))    for the token k + 2 places after the one with state h

One matrix product serves all heads, so a whole draft costs about as much as one step of
a draft model (Cai et al. 2024; this is a chain instead of their tree). When it loses: long
drafts. A head does not know the other drafted tokens or the target's newest one, so
acceptance falls quickly with k. The heads are trained on hidden states of the target's
own answers. Embedding and head are borrowed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.generate.drafter import Draft, Growing
from labkit.model.config import ModelConfig
from labkit.speculate.borrowed import Borrower, TrainedDrafter

HEADS = 3


class MedusaNet(Borrower):
    """`HEADS` square matrices; with zeros, each head predicts the target's own next token."""

    def __init__(self, config: ModelConfig, ids: Tensor):
        super().__init__(config, ids)
        self.heads = nn.Linear(config.hidden_size, HEADS * config.hidden_size, bias=False)
        nn.init.zeros_(self.heads.weight)

    def forward(self, states: Tensor) -> Tensor:
        """Return the inputs of the head rows [..., HEADS, E] from true states [..., E]."""
        turned = F.silu(self.heads(states)).unflatten(-1, (HEADS, -1))
        return states[..., None, :] + turned


class Medusa(TrainedDrafter):
    """Draft up to `HEADS` tokens from the newest true state."""

    name = "medusa"

    def begin(self, request, rows, hidden=None) -> None:
        self.request = request
        self.observe((), hidden)

    def propose(self, rows, limits) -> list[Draft]:
        scores = self.net.logits(self.net(self.newest.float()))  # [B, HEADS, v]
        drafts = [Growing(self.request, *both, self.ids) for both in zip(rows, limits)]
        for draft, logits in zip(drafts, scores):
            for row in logits[: draft.limit]:
                if not draft.add(row):
                    break
        return [draft.draft() for draft in drafts]

    def observe(self, accepted, hidden=None) -> None:
        self.newest = torch.stack([states[-1] for states in hidden])  # [B, E]

    def select(self, keep) -> None:
        self.newest = self.newest[list(keep)]
