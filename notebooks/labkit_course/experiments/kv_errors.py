"""Compare groupings of a KV cache's scales: rounding errors, predicted and measured.

    predicted = sqrt(mean over groups of (step^2 / 12)),  step = (max - min) / (2^bits - 1)
    measured  = sqrt(mean (rounded - number)^2)

Both are shares of the root mean square of the numbers; a group is what shares a step. The
prediction needs only each group's range and assumes that numbers lie anywhere between two
steps. It is too high if few numbers set the range and most lie close together, and it ignores
the rounding of the scale itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.cache import ContiguousCache
from labkit.cache.quantized.blocks import decode, encode, grouped
from labkit.errors import BadRequest
from labkit.plan.kv_formats import Part


@torch.inference_mode()
def keys_and_values(model, tokens: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return keys (rotated) and values of a text, one [K, S, D] per layer, in float32."""
    if any(
        layer.latent_dim is not None or layer.shared_with is not None
        for layer in model.config.kv_shape.layers
    ):
        raise BadRequest(
            "Some layers of this model have no keys and values of their own; choose another model."
        )
    cache = ContiguousCache(
        model.config.kv_shape, capacity=len(tokens), dtype=model.dtype, device=model.device
    )
    model.hidden_states(torch.tensor([list(tokens)], device=model.device), cache)
    return tuple(
        [side[0, :, : len(tokens)].float() for side in sides]
        for sides in (cache.keys, cache.values)
    )


def relative_errors(layers: Sequence[Tensor], part: Part) -> tuple[float, float]:
    """Return (predicted, measured) root mean square error over all layers, as shares."""
    if part.axis is None or not layers or min(numbers.shape[1] for numbers in layers) < part.block:
        raise BadRequest(
            f"Errors are those of a quantized part over at least {part.block if part.axis else 1} tokens of at least "
            "one layer; give longer texts, or a part with an axis."
        )
    expected = found = size = 0.0
    for numbers in layers:
        whole = numbers[:, : numbers.shape[1] // part.block * part.block]
        groups, shared = grouped(whole[None], part)
        step = (groups.amax(shared) - groups.amin(shared)) / ((1 << part.bits) - 1)
        expected += float((step.double().square() / 12).mean())
        held = decode(encode(whole[None], part), part, whole.shape[-1])[0]
        found += float((held - whole).double().square().mean())
        size += float(whole.double().square().mean())
    return (
        ((expected / size) ** 0.5, (found / size) ** 0.5) if size else (0.0, 0.0)
    )  # zeros stay zeros


def channel_sizes(numbers: Tensor) -> Tensor:
    """Return the mean size of each channel [K, D], which a scale per channel can follow."""
    return numbers.abs().mean(1)


def loudest(layers: Sequence[Tensor]) -> tuple[int, int]:
    """Return the (layer, head) with the largest ratio of largest to median channel."""
    ratios = torch.stack(
        [channel_sizes(n).amax(-1) / channel_sizes(n).median(-1).values for n in layers]
    )  # [L, K]
    best = int(ratios.argmax())
    return best // ratios.shape[1], best % ratios.shape[1]


def spread(layers: Sequence[Tensor]) -> float:
    """Return largest channel over median channel, the median over all layers and heads."""
    ratios = [channel_sizes(n).amax(-1) / channel_sizes(n).median(-1).values for n in layers]
    return float(torch.cat(ratios).median())
