"""The small network of the hidden-state drafter: one layer, and it knows what the target was about to say.

    x_i    = fc([ h_i ; embed(t_i+1) ])          what the target thought at token i, and what came of it
    h'_i+1 = norm(layer(x_0 .. x_i))             the guess at its next state; times head rows: logits of token i + 2

Embedding and head are the target's (EAGLE, Li et al. 2024). It starts from the target's last layer, which did nearly this
job already; what fc should give that layer is a linear regression (`fitted_start`), good for an alpha of 0.15 to 0.3 on
the default model before any training. Cost: 2 E² + a layer + v E weights a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.model.config import ModelConfig
from labkit.model.decoder import Decoder, make_layer
from labkit.model.norm import make_norm
from labkit.model.rope import Rotary
from labkit.speculate.lent import Lent

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


class HiddenStateNet(Lent):
    """fc, one layer, a norm."""

    def __init__(self, config: ModelConfig, ids: Tensor):
        if config.architecture not in ARCHITECTURES or config.latent_dim is not None:
            raise BadRequest(f"A hidden-state draft is made for {', '.join(ARCHITECTURES)}, not for {config.architecture}.")
        super().__init__(config, ids)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = make_layer(self.config, 0)
        self.norm = make_norm(config)
        self.rotary = Rotary(config.rope, config.head_dim)

    def forward(self, states: Tensor, tokens: Tensor, cache, counts: Sequence[int] | None = None) -> Tensor:
        """True or guessed states [B, T, E] and the tokens after them [B, T] -> guesses at the next states [B, T, E]."""
        positions = cache.advance(tokens.shape[1], counts)
        cos, sin = self.rotary(positions, cache.lengths, torch.float32)
        x = self.fc(torch.cat((states.float(), self.embed(tokens)), -1))
        return self.norm(self.layer(x, cos, sin, cache))


@torch.no_grad()
def fitted_start(target: Decoder, ids: Tensor, sequences: Sequence[Tensor]) -> HiddenStateNet:
    """A net with the target's last layer and norm, and the fc that best gives that layer its input, by least squares.

    `target` is a plain float32 decoder; a few thousand tokens in `sequences` [T] do for the 2 E unknowns of a row."""
    net = HiddenStateNet(target.config, ids)
    net.layer.load_state_dict(target.layers[-1].state_dict())
    net.norm.load_state_dict(target.norm.state_dict())
    inputs: list[Tensor] = []
    hook = target.layers[-1].register_forward_pre_hook(lambda module, given: inputs.append(given[0][0]))
    E = target.config.hidden_size
    gram, cross = torch.zeros(2 * E, 2 * E, dtype=torch.float64), torch.zeros(2 * E, E, dtype=torch.float64)
    try:
        for tokens in sequences:
            tokens = tokens.long()
            hidden = target.hidden_states(tokens[None])[0]
            given = torch.cat((hidden[:-1], target.embed_tokens(tokens[1:])), -1).double()[1:]
            gram += given.T @ given
            cross += given.T @ inputs.pop()[2:].double()  # the first token's states are like no other's
    finally:
        hook.remove()
    gram.diagonal().add_(1e-3 * gram.diagonal().mean())
    net.fc.weight.copy_(torch.linalg.solve(gram, cross).T)
    return net.bind(target)
