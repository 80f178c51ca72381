"""Medusa-style heads: from one true state, guesses at several tokens at once, each without knowing the one before.

    head k:  rows · (h + silu(W_k h))        for the token k + 1 places behind the state's own; head 0 is the target's

One product for all heads, so a whole draft costs about what one step of a chain does (Cai et al. 2024, a chain instead of
their tree). But the second guess does not know the first, and the token that the target has just added is not looked at:
acceptance falls quickly with k. Trained on the hidden states of the target's own answers; embedding and head are lent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.generate.sampling import InvalidLogits
from labkit.model.config import ModelConfig
from labkit.speculate.corpus import Text
from labkit.speculate.draft import Draft, Drafter, choose, drafted
from labkit.speculate.draft_model import bytes_read
from labkit.speculate.lent import Lent

HEADS = 3


class MedusaNet(Lent):
    """`HEADS` square matrices, zero at first: every head then says what the target says next."""

    def __init__(self, config: ModelConfig, ids: Tensor):
        super().__init__(config, ids)
        self.heads = nn.Linear(config.hidden_size, HEADS * config.hidden_size, bias=False)
        nn.init.zeros_(self.heads.weight)

    def forward(self, states: Tensor) -> Tensor:
        """True states [..., E] -> what each head gives to the rows [..., HEADS, E]."""
        turned = F.silu(self.heads(states)).unflatten(-1, (HEADS, -1))
        return states[..., None, :] + turned


class Medusa(Drafter):
    """Drafts up to `HEADS` tokens from the newest true state."""

    name, wants_hidden = "medusa", True

    def __init__(self, net: MedusaNet, target, packed: bool = True):
        net.check(target)
        net.bind(target)
        self.net, self.ids = net.packed() if packed else net, net.ids.long()
        self.cost = self.net.nbytes() / bytes_read(target)

    def check(self, target) -> None:
        self.net.check(target)

    def begin(self, request, rows, hidden=None) -> None:
        self.request = request
        self.newest = torch.stack([states[-1] for states in hidden])  # [B, E]

    def propose(self, rows, limits) -> list[Draft]:
        scores = self.net.logits(self.net(self.newest.float()))  # [B, HEADS, v]
        return [self._draft(row, logits[:limit]) for row, logits, limit in zip(rows, scores, limits)]

    def _draft(self, row, scores: Tensor) -> Draft:
        said, drawn = [], []
        for logits in scores:
            try:
                token, q = choose(logits, self.request, row, said, self.ids)
            except InvalidLogits:  # nothing is left that may be drafted
                break
            said.append(token)
            drawn += () if q is None else (q,)
        return drafted(said, drawn)

    def observe(self, accepted, hidden=None) -> None:
        self.newest = torch.stack([states[-1] for states in hidden])

    def select(self, keep) -> None:
        self.newest = self.newest[list(keep)]


def medusa_loss(net: MedusaNet, texts: Sequence[Text]) -> Tensor:
    """Mean cross-entropy of all heads to the target's own distributions; matrix products in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        total = torch.zeros(())
        states = [text.hidden[text.before_answer :].float() for text in texts]
        guesses = [net(state) for state in states]
        for k in range(HEADS):
            said = net.logits(torch.cat([guess[: -k - 1, k] for guess in guesses]))
            with torch.no_grad():
                wanted = net.logits(torch.cat([state[k + 1 :] for state in states])).float().softmax(-1)
            total = total + F.cross_entropy(said.float(), wanted) / HEADS
    return total


@torch.inference_mode()
def head_agreement(net: MedusaNet, texts: Sequence[Text]) -> dict[str, float]:
    """How often each head names the token that came, given that the heads before it did: the alpha of each place."""
    right = torch.zeros(HEADS, 2)
    for text in texts:
        start, ids = text.before_answer, net.ids.long()
        named = ids[net.logits(net(text.hidden[start : -HEADS - 1].float())).argmax(-1)]  # [n, HEADS]
        came = torch.stack([text.tokens[start + 2 + k : len(text.tokens) - HEADS + 1 + k] for k in range(HEADS)], 1)
        same = (named == came).long().cumprod(1)
        right[:, 0] += same.sum(0)
        right[:, 1] += torch.cat((torch.tensor([len(same)]), same.sum(0)[:-1]))
    alphas = (right[:, 0] / right[:, 1].clamp(min=1)).tolist()
    return {f"head {k + 1}": alpha for k, alpha in enumerate(alphas)} | {"all": float(right[:, 0].sum() / right[:, 1].sum().clamp(min=1))}
