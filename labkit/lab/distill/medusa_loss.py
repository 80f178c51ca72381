"""Train and score Medusa heads on the target's answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.lab.distill.corpus import Text
from labkit.speculate.medusa import HEADS, MedusaNet


def medusa_loss(net: MedusaNet, texts: Sequence[Text]) -> Tensor:
    """Return the mean cross-entropy of all heads to the target's distributions.

    Matrix products are in bfloat16.
    """
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
    """Return the alpha of each head ("head 1", …) and of all heads ("all").

    The alpha of a head is its accuracy on the tokens for which all earlier heads are
    right.
    """
    right, examined = torch.zeros(HEADS), torch.zeros(HEADS)
    for text in texts:
        first, end = text.before_answer, len(text.tokens) - HEADS + 1
        guesses = net.ids[net.logits(net(text.hidden[first : -HEADS - 1].float())).argmax(-1)]
        true = [text.tokens[first + 2 + k : end + k] for k in range(HEADS)]
        same = (guesses == torch.stack(true, 1)).long().cumprod(1)  # [n, HEADS]
        right += same.sum(0)
        examined += F.pad(same.sum(0)[:-1], (1, 0), value=len(same))
    alphas = {f"head {k + 1}": float(right[k] / examined[k].clamp(min=1)) for k in range(HEADS)}
    return alphas | {"all": float(right.sum() / examined.sum().clamp(min=1))}
