"""Initialize a hidden-state draft from the target's last layer, by regression.

On the default model this net has an alpha of 0.15 to 0.3 before any training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.model.decoder import Decoder
from labkit.speculate.hidden_state import HiddenStateNet


@torch.no_grad()
def fitted_start(target: Decoder, ids: Tensor, sequences: Sequence[Tensor]) -> HiddenStateNet:
    """Return a net with the target's last layer, and an `fc` fitted by least squares.

    The fit predicts the input of the last layer from the last hidden state and the next
    token's embedding. `target` is a plain float32 decoder. Each row of `fc` has 2 E
    unknowns, so a few thousand tokens in `sequences` [T] are enough.
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
            known = torch.cat((hidden[:-1], target.embed_tokens(tokens[1:].long())), -1)
            known = known[1:].double()  # the first token's state differs from all others
            gram += known.T @ known
            cross += known.T @ inputs.pop()[2:].double()
    finally:
        hook.remove()
    gram.diagonal().add_(1e-3 * gram.diagonal().mean())
    net.fc.weight.copy_(torch.linalg.solve(gram, cross).T)
    return net.bind(target)
