"""Start a hidden-state draft from the target's last layer by regression.

The fitted net has an alpha of 0.15 to 0.3 on the default model before any training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.model.decoder import Decoder
from labkit.speculate.hidden_state import HiddenStateNet


@torch.no_grad()
def fitted_start(target: Decoder, ids: Tensor, sequences: Sequence[Tensor]) -> HiddenStateNet:
    """Return a net with the target's last layer and the best fc by least squares.

    The fc is the one that best gives the last layer its input. `target` is a plain
    float32 decoder; a few thousand tokens in `sequences` [T] are enough for the 2 E
    unknowns per row.
    """
    net = HiddenStateNet(target.config, ids)
    net.layer.load_state_dict(target.layers[-1].state_dict())
    net.norm.load_state_dict(target.norm.state_dict())
    inputs: list[Tensor] = []
    hook = target.layers[-1].register_forward_pre_hook(
        lambda module, args: inputs.append(args[0][0])
    )
    E = target.config.hidden_size
    gram = torch.zeros(2 * E, 2 * E, dtype=torch.float64)
    cross = torch.zeros(2 * E, E, dtype=torch.float64)
    try:
        for tokens in sequences:
            hidden = target.hidden_states(tokens.long()[None])[0]
            given = torch.cat((hidden[:-1], target.embed_tokens(tokens[1:].long())), -1)
            given = given[1:].double()  # the first token's states are like no other's
            gram += given.T @ given
            cross += given.T @ inputs.pop()[2:].double()
    finally:
        hook.remove()
    gram.diagonal().add_(1e-3 * gram.diagonal().mean())
    net.fc.weight.copy_(torch.linalg.solve(gram, cross).T)
    net.bind(target)
    return net
