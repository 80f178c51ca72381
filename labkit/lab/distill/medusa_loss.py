"""Training loss and agreement of Medusa heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.lab.distill.corpus import Text
from labkit.speculate.medusa import HEADS, MedusaNet


def medusa_loss(net: MedusaNet, texts: Sequence[Text]) -> Tensor:
    """Return the mean cross-entropy of all heads to the target's distributions, in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        total = torch.zeros(())
        states = [text.hidden[text.before_answer :].float() for text in texts]
        guesses = [net(state) for state in states]
        for k in range(HEADS):
            guessed = net.logits(torch.cat([guess[: -k - 1, k] for guess in guesses])).float()
            with torch.no_grad():
                true = net.logits(torch.cat([state[k + 1 :] for state in states])).float()
            total = total + F.cross_entropy(guessed, true.softmax(-1)) / HEADS
    return total


@torch.inference_mode()
def head_agreement(net: MedusaNet, texts: Sequence[Text]) -> dict[str, float]:
    """Return each head's alpha: its accuracy on tokens whose earlier heads were right."""
    right = torch.zeros(HEADS, 2)
    for text in texts:
        start, ids = text.before_answer, net.ids.long()
        logits = net.logits(net(text.hidden[start : -HEADS - 1].float()))
        guesses = ids[logits.argmax(-1)]  # [n, HEADS]
        end = len(text.tokens) - HEADS + 1
        true = [text.tokens[start + 2 + k : end + k] for k in range(HEADS)]
        same = (guesses == torch.stack(true, 1)).long().cumprod(1)
        right[:, 0] += same.sum(0)
        right[:, 1] += torch.cat((torch.tensor([len(same)]), same.sum(0)[:-1]))
    alphas = (right[:, 0] / right[:, 1].clamp(min=1)).tolist()
    return {f"head {k + 1}": alpha for k, alpha in enumerate(alphas)} | {
        "all": float(right[:, 0].sum() / right[:, 1].sum().clamp(min=1))
    }
