"""Draft with one small layer that predicts the target's next hidden states.

    x_i    = fc([ h_i ; embed(t_i+1) ])        the target's state at token i, and the next token
    h'_i+1 = norm(layer(x_0 .. x_i))           the predicted next state; head rows give logits

Embedding and head are those of the target (EAGLE, Li et al. 2024). `labkit distill`
trains the net.

A pass of the target gives a true state for every token that it read. Before drafting, the
net reads the true states that it has not seen, in one pass. Each further draft token uses
a predicted state. After the target's pass, the net's cache is rewound to true states, and
the new true states wait for the next draft.

Cost: 2 E² + a layer + v E weights per drafted token, about a thirtieth of the default
model. When it loses: text unlike the training text, and long drafts, because the errors
of predicted states add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from labkit.cache import ContiguousCache, KVCache
from labkit.errors import BadRequest
from labkit.generate.drafter import Draft, Growing
from labkit.model.config import ModelConfig
from labkit.model.decoder import last_real, make_layer
from labkit.model.norm_mlp import make_norm
from labkit.model.rope import Rotary
from labkit.speculate.borrowed import Borrower, TrainedDrafter

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


class HiddenStateNet(Borrower):
    """A linear layer `fc`, one decoder layer and a norm.

    Raises BadRequest for architectures other than `ARCHITECTURES`.
    """

    def __init__(self, config: ModelConfig, ids: Tensor):
        if config.architecture not in ARCHITECTURES or config.latent_dim is not None:
            raise BadRequest(
                f"A hidden-state draft is made for {', '.join(ARCHITECTURES)}, "
                f"not for {config.architecture}."
            )
        super().__init__(config, ids)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = make_layer(self.config, 0)
        self.norm = make_norm(config)
        self.rotary = Rotary(config.rope, config.head_dim)

    def forward(
        self, states: Tensor, tokens: Tensor, cache: KVCache, counts: Sequence[int] | None = None
    ) -> Tensor:
        """Predict the next states [B, T, E] from states [B, T, E] and the tokens after them [B, T].

        `counts` has the number of real tokens per row; None means all.
        """
        positions = cache.advance(tokens.shape[1], counts)
        cos, sin = self.rotary(positions, cache.lengths, torch.float32)
        x = self.fc(torch.cat((states.float(), self.embed(tokens)), -1))
        return self.norm(self.layer(x, cos, sin, cache))


class HiddenState(TrainedDrafter):
    """Draft with a `HiddenStateNet`; `labkit.speculate.load_draft` reads one from a file."""

    name = "hidden_state"

    def begin(self, request, rows, hidden=None) -> None:
        self.request, self.device = request, self.net.norm.weight.device
        self.cache = ContiguousCache(
            self.net.config.kv_shape,
            batch=len(rows),
            capacity=max(len(row.prompt) + row.budget for row in rows),
            device=self.device,
        )
        # True states [n, E] per row that the net has not read. It reads each with the next token.
        self.waiting = list(hidden)
        self.read = self.cache.lengths  # cached tokens that come from true states

    def propose(self, rows, limits) -> list[Draft]:
        drafting = [i for i, limit in enumerate(limits) if limit]
        drafts = [Growing(self.request, *both, self.ids) for both in zip(rows, limits)]
        nothing = self.waiting[0][:0]
        states = [nothing] * len(rows)
        tokens: list[list[int]] = [[]] * len(rows)
        for i in drafting:
            states[i], self.waiting[i] = self.waiting[i], nothing
            tokens[i] = rows[i].history[-len(states[i]) :]
        first = True
        while drafting:
            guesses = self._pass(states, tokens)  # [B, E]
            if first:
                self.read, first = self.cache.lengths, False
            scores = self.net.logits(guesses[drafting])
            drafting = [i for i, row in zip(drafting, scores) if drafts[i].add(row)]
            states, tokens = [nothing] * len(rows), [[]] * len(rows)
            for i in drafting:
                states[i], tokens[i] = guesses[i : i + 1], drafts[i].tokens[-1:]
        return [draft.draft() for draft in drafts]

    def observe(self, accepted, hidden=None) -> None:
        self.cache.rewind(self.read)
        pairs = zip(self.waiting, hidden)
        self.waiting = [torch.cat((old, new)) if len(old) else new for old, new in pairs]

    def select(self, keep) -> None:
        self.cache.select(keep)
        self.read, self.waiting = self.cache.lengths, [self.waiting[i] for i in keep]

    def _pass(self, states: list[Tensor], tokens: list[list[int]]) -> Tensor:
        """Run the net on each row's states [n, E] and n tokens; return its last prediction [B, E].

        Rows without tokens have arbitrary numbers.
        """
        counts = [len(piece) for piece in tokens]
        width = max(counts)
        padded = [piece + [0] * (width - len(piece)) for piece in tokens]
        guesses = self.net(
            pad_sequence(states, batch_first=True),
            torch.tensor(padded, device=self.device),
            self.cache,
            None if min(counts) == width else counts,
        )
        return last_real(guesses, counts)[:, 0]
