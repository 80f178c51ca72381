"""Cut a smaller model out of the target: keep the layers that do most, and train them.

Each layer adds to one running vector; a layer that hardly turns it can go (block influence,
ShortGPT, Men et al. 2024):

    influence(layer) = 1 - mean over tokens of cos(vector before, vector after)

Without training the cut model is of no use; distilled on the target's answers it makes a draft
or a small model. As a drafter it needs no hidden states, and its step costs kept / all layers
plus a small head.
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
from labkit.speculate.draft_model import DraftModel
from labkit.speculate.layer_skip import without_layers


@torch.no_grad()
def influence(target: Decoder, sequences: Sequence[Tensor]) -> list[float]:
    """Return the influence of each layer of a plain decoder over `sequences` of tokens [T].

    The first token of a sequence is left out.
    """
    turned, hooks = [0.0] * len(target.layers), []
    for i, layer in enumerate(target.layers):

        def measure(module, given, out, i=i):
            turned[i] += float((1 - F.cosine_similarity(given[0][0, 1:], out[0, 1:], -1)).sum())

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
    """Return a model of the `keep` layers of most influence, with weights of its own.

    Embedding and head are shared with the target. The first and the last layer are always kept:
    nothing else reads the embedding or writes for the head.
    """
    L = target.config.num_layers
    if not 2 <= keep <= L:
        raise BadRequest(f"{keep} layers of {L} are to be kept; give 2 to {L}.")
    inner = sorted(range(1, L - 1), key=lambda i: -influences[i])[: keep - 2]
    draft = without_layers(target, [i for i in range(1, L - 1) if i not in inner])
    draft.layers, draft.norm = copy.deepcopy(draft.layers), copy.deepcopy(draft.norm)
    draft.name = f"{target.name}, {keep} of {L} layers"
    return draft


class Pruned(nn.Module):
    """The trained part of a pruned model: layers and norm; logits for `ids` only."""

    def __init__(self, draft: Decoder, ids: Tensor):
        super().__init__()
        self.layers, self.norm = draft.layers, draft.norm
        self.whole = {"draft": draft, "rows": head_rows(draft, ids.long())}  # not parameters
        self.ids = ids

    def logits(self, states: Tensor) -> Tensor:
        return states @ self.whole["rows"].T

    def states(self, tokens: Tensor) -> Tensor:
        return self.whole["draft"].hidden_states(tokens.long()[None])[0]  # [T, E]

    def drafter(self) -> DraftModel:
        """Return the current model as a drafter with a small head."""
        from labkit.speculate.self_quantized import with_head_of

        return DraftModel(with_head_of(self.whole["draft"], self.ids), name="pruned", ids=self.ids)


def pruned_loss(net: Pruned, texts: Sequence[Text]) -> Tensor:
    """Return the mean cross-entropy to the target's distributions in the answers, in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        starts = [text.before_answer for text in texts]
        mine = torch.cat([net.states(text.tokens)[start:] for text, start in zip(texts, starts)])
        with torch.no_grad():
            true = torch.cat([text.hidden[start:].float() for text, start in zip(texts, starts)])
            target = net.logits(true).float().softmax(-1)
        return F.cross_entropy(net.logits(mine).float(), target)


@torch.inference_mode()
def pruned_agreement(net: Pruned, texts: Sequence[Text]) -> dict[str, float]:
    """Return how often the draft predicts the next token of held-out greedy answers."""
    counts: dict[str, list[int]] = {}
    for text in texts:
        start = text.before_answer
        named = net.ids[net.logits(net.states(text.tokens)[start:-1]).argmax(-1)]
        tally = counts.setdefault(text.kind, [0, 0])
        tally[0] += int((named == text.tokens[start + 1 :]).sum())
        tally[1] += len(named)
    right, total = (sum(column) for column in zip(*counts.values()))
    return {kind: hits / n for kind, (hits, n) in counts.items()} | {"all": right / total}
