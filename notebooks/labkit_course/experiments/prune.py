"""Keep the layers of a model that change its state most, and train them (notebook 08).

Each layer adds to one running vector. A layer that hardly turns this vector can be left
out (block influence, ShortGPT, Men et al. 2024):

    influence(layer) = 1 - mean over tokens of cos(vector before, vector after)

Without training, the remaining model is of no use. Trained on the target's answers, it
is a draft or a small model. A draft step then costs kept / all layers, plus the head.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.lab.distill.corpus import Text
from labkit.model.decoder import Decoder
from labkit.speculate.borrowed import head_rows
from labkit.speculate.layer_skip import without_layers


@torch.no_grad()
def influence(target: Decoder, sequences: Sequence[Tensor]) -> list[float]:
    """Return the influence of each layer of a plain decoder.

    It is measured over `sequences` of tokens [T]. The first token of each sequence is
    left out.
    """
    turned, hooks = [0.0] * len(target.layers), []
    for i, layer in enumerate(target.layers):

        def measure(module, inputs, output, i=i):
            cosines = F.cosine_similarity(inputs[0][0, 1:], output[0, 1:], -1)
            turned[i] += float((1 - cosines).sum())

        hooks.append(layer.register_forward_hook(measure))
    try:
        for tokens in sequences:
            target.hidden_states(tokens.long()[None])
    finally:
        for hook in hooks:
            hook.remove()
    count = sum(len(tokens) - 1 for tokens in sequences)
    return [total / count for total in turned]


def pruned(target: Decoder, keep: int, influences: Sequence[float]) -> Decoder:
    """Return a model of the `keep` layers with the largest influence.

    The layers are copies. The embedding and the head are shared with the target. The
    first and the last layer always stay, because no other layer reads the embedding or
    writes for the head. Raises BadRequest if `keep` is not from 2 to the number of
    layers.
    """
    L = target.config.num_layers
    if not 2 <= keep <= L:
        raise BadRequest(f"keep is {keep}; give 2 to {L} layers.")
    inner = sorted(range(1, L - 1), key=lambda i: -influences[i])[: keep - 2]
    draft = without_layers(target, [i for i in range(1, L - 1) if i not in inner])
    draft.layers, draft.norm = copy.deepcopy(draft.layers), copy.deepcopy(draft.norm)
    draft.name = f"{target.name}, {keep} of {L} layers"
    return draft


class Pruned(nn.Module):
    """The trained part of a pruned model: its layers and its norm.

    `ids` [v] are the tokens that it predicts.
    """

    def __init__(self, draft: Decoder, ids: Tensor):
        super().__init__()
        self.layers, self.norm = draft.layers, draft.norm
        # A dict hides the whole model from `parameters()`.
        self.whole = {"draft": draft, "rows": head_rows(draft, ids.long())}
        self.ids = ids

    def logits(self, states: Tensor) -> Tensor:
        return states @ self.whole["rows"].T

    def states(self, tokens: Tensor) -> Tensor:
        return self.whole["draft"].hidden_states(tokens.long()[None])[0]  # [T, E]


def pruned_loss(net: Pruned, texts: Sequence[Text]) -> Tensor:
    """Return the mean cross-entropy to the target's distributions in the answers.

    Matrix products are in bfloat16.
    """
    with torch.autocast("cpu", torch.bfloat16):
        starts = [text.before_answer for text in texts]
        ours = torch.cat([net.states(text.tokens)[start:] for text, start in zip(texts, starts)])
        with torch.no_grad():
            true = torch.cat([text.hidden[start:].float() for text, start in zip(texts, starts)])
            target = net.logits(true).float().softmax(-1)
        return F.cross_entropy(net.logits(ours).float(), target)


@torch.inference_mode()
def pruned_agreement(net: Pruned, texts: Sequence[Text]) -> dict[str, float]:
    """Return how often the model predicts the next token of held-out greedy answers.

    The keys are the kinds of text, and "all".
    """
    counts: dict[str, list[int]] = {}
    for text in texts:
        start = text.before_answer
        predicted = net.ids[net.logits(net.states(text.tokens)[start:-1]).argmax(-1)]
        tally = counts.setdefault(text.kind, [0, 0])
        tally[0] += int((predicted == text.tokens[start + 1 :]).sum())
        tally[1] += len(predicted)
    right, total = (sum(column) for column in zip(*counts.values()))
    return {kind: hits / n for kind, (hits, n) in counts.items()} | {"all": right / total}
