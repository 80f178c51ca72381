"""Train and score a hidden-state net on chains of guesses, as drafting uses it.

The second token of a draft depends on one guessed state, and the third on two. A net
that was trained only on true states fails there. Here each token of an answer starts a
chain of `steps` guesses. A guess sees the true states up to the start of its chain and
the earlier guesses of its chain, as in drafting (training-time test, EAGLE-3, Li et al.
2025; HASS, Zhang et al. 2024).

    loss = sum over steps k of decay^k * (cross-entropy + state_weight * smooth-L1)

The cross-entropy is to the target's distribution over `ids`, and smooth-L1 to its
state.

`acceptance` counts how many guesses the target would accept on held-out greedy answers.
This is the drafter's alpha for greedy text, without running the target. Texts are
packed end to end, without padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.lab.distill.corpus import Text
from labkit.model.rope import rotate
from labkit.speculate.hidden_state import HiddenStateNet

DECAY = 0.8


def chains(net: HiddenStateNet, texts: Sequence[Text], steps: int) -> Iterator[Tensor]:
    """Yield the guesses [N_k, E] of each step k, text after text.

    The chain that starts at token i guesses the state at token i + 1 + k in step k. Its
    starts are `text.before_answer` to T - 2 - k, so the last guess is at the last
    token.
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
        # Step 0 reads every token, but guesses only from the first start on.
        places = [range(first if k else 0, n - k) for first, n in zip(firsts, lengths)]
        sizes = [len(place) for place in places]
        tokens = torch.cat([e[place.start + 1 + k :] for e, place in zip(embedded, places)])
        x = net.fc(torch.cat((states, tokens), -1)).float()
        heads = attention.qkv(layer.attn_norm(x)).view(len(x), H + 2 * K, D)
        attended, residuals = [], []
        for t, (own, residual) in enumerate(zip(heads.split(sizes), x.split(sizes))):
            positions = torch.arange(places[t].start + k, places[t].stop + k)[None]
            cos, sin = net.rotary(positions, (lengths[t] + steps,), torch.float32)
            q, key, value = own.transpose(0, 1).float().split((H, K, K))  # [heads, n, D]
            if attention.q_norm is not None:
                q, key = attention.q_norm(q), attention.k_norm(key)
            q, key = (rotate(part[None], cos, sin)[0] for part in (q, key))
            keys[t].append(key)
            values[t].append(value)
            skip = firsts[t] - places[t].start
            attended.append(_attend(q[:, skip:], keys[t], values[t], firsts[t]))
            residuals.append(residual[skip:])
        x = torch.cat(residuals) + attention.o(torch.cat(attended))
        guesses = net.norm(x + layer.mlp(layer.mlp_norm(x)).float())
        yield guesses
        counts = [len(residual) for residual in residuals]
        # The last start of a text has no further token.
        states = torch.cat([part[:-1] for part in guesses.split(counts)])


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], first: int) -> Tensor:
    """Attend from starts first .. first + n - 1, queries [H, n, D], to [n, H D].

    Each start sees the true keys up to itself and the keys of its own chain.
    """
    n, N = q.shape[1], keys[0].shape[1]
    past = torch.arange(N) <= torch.arange(first, first + n)[:, None]
    chain = [torch.eye(n, key.shape[1], dtype=torch.bool) for key in keys[1:]]
    key, value, mask = torch.cat(keys, 1), torch.cat(values, 1), torch.cat((past, *chain), 1)
    out = F.scaled_dot_product_attention(q[None], key[None], value[None], mask, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def chain_loss(
    net: HiddenStateNet, texts: Sequence[Text], steps: int = 3, state_weight: float = 0.1
) -> Tensor:
    """Return the loss of some texts, a mean over guesses.

    The formula is in the docstring of this module. To save time, only every second text
    has chains of `steps` guesses. The others have one guess. Matrix products are in
    bfloat16.
    """
    with torch.autocast("cpu", torch.bfloat16):
        long, short = texts[::2], texts[1::2]
        loss = _chain_loss(net, long, steps, state_weight)
        return 0.5 * (loss + _chain_loss(net, short, 1, state_weight)) if short else loss


def _chain_loss(
    net: HiddenStateNet, texts: Sequence[Text], steps: int, state_weight: float
) -> Tensor:
    true = torch.cat([text.hidden[text.before_answer + 1 :] for text in texts]).float()
    with torch.no_grad():
        target = net.logits(true).float().softmax(-1)  # over the tokens `ids` of the net
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
    """Return alpha (accepted / examined tokens) for greedy texts.

    The keys are the kinds of text, and "all". Texts with short answers are left out.
    """
    accepted, examined = Counter[str](), Counter[str]()
    for text in texts:
        first, at = text.before_answer, 0
        if len(text.tokens) - first < draft_length + 2:
            continue
        right = [
            # The last guess of a step has no token after it.
            net.ids[net.logits(guesses).argmax(-1)][:-1] == text.tokens[first + 2 + k :]
            for k, guesses in enumerate(chains(net, [text], draft_length))
        ]
        while at < len(right[0]):
            run = 0
            while run < draft_length and at < len(right[run]) and right[run][at]:
                run += 1
            rejected = run < draft_length and at < len(right[run])
            accepted[text.kind] += run
            examined[text.kind] += run + rejected
            at += run + 1
    alphas = {kind: accepted[kind] / max(1, count) for kind, count in examined.items()}
    return alphas | {"all": accepted.total() / max(1, examined.total())}
