"""The hidden-state drafter: guesses from what the target's last pass left behind, and forgets them after the next.

A pass of the target gives a state for every token that it read. Before drafting, the net reads those it has not seen, in one
pass; each further draft token rests on a guessed state. When the target has judged, the guesses' keys and values are rewound
and the true states wait to be read: the net's cache holds true states of committed tokens only, whatever was refused.

Cost: the net's bytes a drafted token, about a thirtieth of the default model's (see `hidden_net`). It loses on text
unlike what it was trained on, and with long drafts: errors of guessed states add up.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from labkit.cache import make_cache
from labkit.generate.sampling import InvalidLogits
from labkit.model.decoder import last_real
from labkit.speculate.draft import Draft, Drafter, choose, drafted
from labkit.speculate.draft_model import bytes_read
from labkit.speculate.hidden_net import HiddenStateNet


class HiddenState(Drafter):
    """`net` trained for `target` (`labkit distill`, or `labkit.speculate.trained.load_draft`); packed where kernels are."""

    name, wants_hidden = "hidden_state", True

    def __init__(self, net: HiddenStateNet, target, packed: bool = True):
        net.check(target)
        self.net = net.bind(target)
        if packed:
            self.net = self.net.packed()
        self.ids = net.ids.long()
        self.cost = self.net.nbytes() / bytes_read(target)

    def check(self, target) -> None:
        self.net.check(target)

    def begin(self, request, rows, hidden=None) -> None:
        self.request = request
        capacity = max(len(row.prompt) + row.budget for row in rows)
        self.cache = make_cache("contiguous", self.net.config.kv_shape, batch=len(rows), capacity=capacity,
                                dtype=torch.float32, device=self.net.norm.weight.device)  # fmt: skip
        self.waiting = list(hidden)  # true states not yet read [n, E] a row; each goes with the token after its own
        self.read = self.cache.lengths  # entries that rest on true states

    def propose(self, rows, limits) -> list[Draft]:
        drafting = [i for i, limit in enumerate(limits) if limit]
        drafts: list[list[int]] = [[] for _ in rows]
        drawn: list[list[Tensor]] = [[] for _ in rows]
        nothing = self.waiting[0][:0]
        states = [nothing] * len(rows)
        tokens: list = [()] * len(rows)
        for i in drafting:
            states[i], self.waiting[i] = self.waiting[i], nothing
            tokens[i] = rows[i].history[-len(states[i]) :]
        first = True
        while drafting:
            guesses = self._pass(states, tokens)  # [B, E]
            if first:
                self.read, first = self.cache.lengths, False
            scores = self.net.logits(guesses[drafting])
            states, tokens = [nothing] * len(rows), [()] * len(rows)
            for i, logits in zip(drafting, scores):
                with suppress(InvalidLogits):  # nothing is left that it may draft
                    token, q = choose(logits, self.request, rows[i], drafts[i], self.ids)
                    drafts[i].append(token)
                    drawn[i] += () if q is None else (q,)
                    if len(drafts[i]) < limits[i]:
                        states[i], tokens[i] = guesses[i : i + 1], (token,)
            drafting = [i for i in drafting if tokens[i]]
        return [drafted(said, qs) for said, qs in zip(drafts, drawn)]

    def observe(self, accepted, hidden=None) -> None:
        self.cache.rewind(self.read)
        self.waiting = [torch.cat((old, new)) if len(old) else new for old, new in zip(self.waiting, hidden)]

    def select(self, keep) -> None:
        self.cache.select(keep)
        self.read, self.waiting = self.cache.lengths, [self.waiting[i] for i in keep]

    def _pass(self, states: list[Tensor], tokens: list) -> Tensor:
        """Each row's piece, [n, E] and n tokens -> its last guess [B, E]; rows without a piece give anything."""
        counts, device = [len(piece) for piece in tokens], self.net.norm.weight.device
        width = max(counts)
        padded = torch.tensor([[*piece, *(0,) * (width - len(piece))] for piece in tokens], device=device)
        guesses = self.net(pad_sequence(states, batch_first=True), padded, self.cache, None if min(counts) == width else counts)
        return last_real(guesses, counts)[:, 0]
