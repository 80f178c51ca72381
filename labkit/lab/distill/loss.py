"""Train and score a hidden-state net on chains of guesses, as drafting uses it.

A draft's second token depends on one guessed state and its third on two, so a net that was
trained on true states alone fails there. Here every token of an answer starts a chain of `steps`
guesses. Each guess sees the true past up to its start and the guesses of its own chain, as in
drafting (training-time test, EAGLE-3, Li et al. 2025; HASS, Zhang et al. 2024).

    loss = sum over steps k of decay^k * (cross-entropy to the target's distribution over `ids` + smooth-L1 to its state)

`acceptance` counts on held-out answers how many guesses the target would accept: the drafter's
alpha for greedy text, without running the target. Texts are packed end to end, without padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.lab.distill.corpus import Text
from labkit.model.rope import rotate
from labkit.speculate.hidden_state import HiddenStateNet

DECAY = 0.8


def chains(net: HiddenStateNet, texts: Sequence[Text], steps: int) -> Iterator[Tensor]:
    """Yield for each step k the guesses [N_k, E], text after text.

    The guess of start i is for the state at i + 1 + k. Starts are `text.before_answer` to
    T - 2 - k: the last guess is at the last token.
    """
    layer, attention = net.layer, net.layer.attention
    H, K, D = attention.num_heads, attention.num_kv_heads, attention.head_dim
    states = torch.cat([text.hidden[:-1] for text in texts]).float()
    embedded = [net.embed(text.tokens.long()) for text in texts]
    firsts = [text.before_answer for text in texts]
    lengths = [len(text.tokens) - 1 for text in texts]
    # Per text: the true keys [K, n, D], then those of each step.
    keys: list[list[Tensor]] = [[] for _ in texts]
    values: list[list[Tensor]] = [[] for _ in texts]
    for k in range(steps):
        if k == 0:  # every token is read; only those from `first` on are guessed at
            tokens, places = torch.cat([e[1:] for e in embedded]), [range(n) for n in lengths]
        else:
            tokens = torch.cat([e[f + 1 + k :] for e, f in zip(embedded, firsts)])
            places = [range(f, n - k) for f, n in zip(firsts, lengths)]
        x = net.fc(torch.cat((states, tokens), -1)).float()
        heads = attention.qkv(layer.attn_norm(x)).view(len(x), H + 2 * K, D)
        seen, rest = [], []
        for t, (own, residual) in enumerate(zip(_split(heads, places), _split(x, places))):
            positions = torch.arange(places[t].start + k, places[t].stop + k)[None]
            cos, sin = net.rotary(positions, (lengths[t] + steps,), torch.float32)
            own = own.transpose(0, 1).float()  # [H + 2K, n, D]
            q, new = own[:H], own[H : H + K]
            if attention.q_norm is not None:
                q, new = attention.q_norm(q), attention.k_norm(new)
            q, new = rotate(q[None], cos, sin)[0], rotate(new[None], cos, sin)[0]
            if k == 0:
                q, residual = q[:, firsts[t] :], residual[firsts[t] :]
            keys[t].append(new)
            values[t].append(own[H + K :])
            seen.append(_attend(q, keys[t], values[t], firsts[t]))
            rest.append(residual)
        x = torch.cat(rest) + attention.o(torch.cat(seen))
        guesses = net.norm(x + layer.mlp(layer.mlp_norm(x)).float())
        yield guesses
        counts = [n - f - k for f, n in zip(firsts, lengths)]
        # The last start has no further token.
        states = torch.cat([part[:-1] for part in guesses.split(counts)])


def _split(rows: Tensor, places) -> tuple[Tensor, ...]:
    return rows.split([len(place) for place in places])


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], first: int) -> Tensor:
    """Attend from starts first .. first + n - 1, queries [H, n, D], to [n, H D].

    Each start sees the true keys up to itself and the keys of its own chain.
    """
    H, n, D = q.shape
    K, N = keys[0].shape[:2]
    q = q.view(K, H // K, n, D)
    scores = q @ keys[0][:, None].transpose(-1, -2)  # [K, G, n, N]
    hidden = torch.arange(N) > torch.arange(first, first + n)[:, None]
    scores = [scores.masked_fill(hidden, float("-inf"))]
    # A start sees its own chain only: the diagonal.
    scores += [(q * key[:, None, :n]).sum(-1, keepdim=True) for key in keys[1:]]
    weights = (torch.cat(scores, -1) * D**-0.5).softmax(-1)
    out = weights[..., :N] @ values[0][:, None]
    for k, value in enumerate(values[1:]):
        out = out + weights[..., N + k, None] * value[:, None, :n]
    return out.permute(2, 0, 1, 3).reshape(n, H * D)


def chain_loss(
    net: HiddenStateNet, texts: Sequence[Text], steps: int = 3, state_weight: float = 0.1
) -> Tensor:
    """Return the loss above, a mean over guesses; matrix products in bfloat16.

    Only every second text is unrolled, to save time.
    """
    with torch.autocast("cpu", torch.bfloat16):
        unrolled, rest = texts[::2], texts[1::2]
        loss = _chain_loss(net, unrolled, steps, state_weight)
        return 0.5 * (loss + _chain_loss(net, rest, 1, state_weight)) if rest else loss


def _chain_loss(
    net: HiddenStateNet, texts: Sequence[Text], steps: int, state_weight: float
) -> Tensor:
    true = torch.cat([text.hidden[text.before_answer + 1 :] for text in texts]).float()
    with torch.no_grad():
        target = net.logits(true).float().softmax(-1)  # over the tokens that the net can say
    counts = [len(text.tokens) - 1 - text.before_answer for text in texts]
    total = true.new_zeros(())
    for k, guesses in enumerate(chains(net, texts, steps)):
        rows = torch.cat([torch.arange(n - k) + k + sum(counts[:t]) for t, n in enumerate(counts)])
        entropy = F.cross_entropy(net.logits(guesses).float(), target[rows])
        total = total + DECAY**k * (entropy + state_weight * F.smooth_l1_loss(guesses, true[rows]))
    return total


@torch.inference_mode()
def acceptance(
    net: HiddenStateNet, texts: Sequence[Text], draft_length: int = 4
) -> dict[str, float]:
    """Return alpha (accepted / examined) by kind of text, and over `all`, for greedy texts."""
    kept: dict[str, list[int]] = {}
    for text in texts:
        if len(text.tokens) - text.before_answer < draft_length + 2:
            continue
        ids, begin = net.ids.long(), text.before_answer
        right = [
            ids[net.logits(guesses).argmax(-1)][:-1]
            == text.tokens[begin + 2 + k :].long()  # the last has no token after it
            for k, guesses in enumerate(chains(net, [text], draft_length))
        ]
        at = 0
        tally = kept.setdefault(text.kind, [0, 0])
        while at < len(right[0]):
            accepted = 0
            while accepted < draft_length and at < len(right[accepted]) and right[accepted][at]:
                accepted += 1
            tally[0] += accepted
            tally[1] += accepted + (accepted < draft_length and at < len(right[accepted]))
            at += accepted + 1
    found = {kind: a / max(n, 1) for kind, (a, n) in kept.items()}
    found["all"] = sum(a for a, _ in kept.values()) / max(1, sum(n for _, n in kept.values()))
    return found
