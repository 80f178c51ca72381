"""AWQ: scale up the important columns before rounding; undo it one operation before.

Weights that multiply large activations need the finest rounding. Multiply input column
k of W by s_k, and divide the operation that produces x_k by s_k. The product stays the
same, but W is rounded differently. The scales are s = mean|x|^alpha; alpha is searched
from 0 to 1 by the error on the calibration text, tr(D H D^T) with D = round(W s) / s -
W (see calibrate). Source: Lin et al., "AWQ: activation-aware weight quantization",
2023.

Folded into a norm's weight or into the rows of the preceding linear layer, the scales
cost nothing at inference. A `Fold` says which operation precedes which layers; code
that knows the model makes it. If a KV head serves several query heads, their inputs
share a scale. AWQ cannot help if no linear operation precedes a layer (after an
activation function), and gains nothing at 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.quant.calibrate import InputStatistics

ALPHAS = tuple(i / 10 for i in range(11))
ROWS = 768  # evenly spaced rows on which alphas are compared; all rows share the scale


@dataclass(frozen=True)
class Fold:
    """`linears` all read what `preceding` writes.

    `rows` are the rows of a preceding linear layer that they read (None: all). Each
    block of `head_dim` rows is repeated for `repeat` query heads (v before o in
    grouped-query attention).
    """

    preceding: str
    linears: tuple[str, ...]
    rows: tuple[int, int] | None = None
    repeat: int = 1
    head_dim: int = 1
    plus_one: bool = False  # norms that multiply by (1 + weight)

    def shared(self, values: Tensor) -> Tensor:
        """Average values per input [K] over the heads that share a preceding output."""
        if self.repeat == 1:
            return values
        return values.view(-1, self.repeat, self.head_dim).mean(1).flatten()

    def spread(self, values: Tensor) -> Tensor:
        """Repeat values per preceding output for each input of the linears [K]."""
        if self.repeat == 1:
            return values
        return values.view(-1, 1, self.head_dim).expand(-1, self.repeat, -1).flatten()

    @torch.no_grad()
    def apply(self, model: nn.Module, scale: Tensor) -> None:
        """Divide the preceding outputs by `scale`; multiply the weights that read them.

        The function that the model computes does not change. Raises BadRequest if the
        number of outputs differs.
        """
        module = model.get_submodule(self.preceding)
        weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
        start, stop = self.rows or (0, len(weight))
        if stop - start != len(scale):
            sizes = f"{stop - start} values there, not the {len(scale)} of the scales"
            raise BadRequest(f"{self.preceding} writes {sizes}; correct the map.")
        if self.plus_one:
            weight[start:stop] = (1 + weight[start:stop]) / scale - 1
        else:
            weight[start:stop] /= scale.view(-1, *[1] * (weight.ndim - 1))
        if bias is not None:
            bias[start:stop] /= scale
        for name in self.linears:
            model.get_parameter(f"{name}.weight").mul_(self.spread(scale))


def search_scale(
    fold: Fold,
    weights: Sequence[Tensor],
    statistics: InputStatistics,
    encode: Callable[[Tensor, InputStatistics], Tensor],
) -> tuple[Tensor, float]:
    """Return the best scale [outputs of the fold] and its alpha.

    `encode(weight, statistics)` returns the weight as it would be stored.
    """
    stacked = torch.cat([w.detach().float() for w in weights])  # [N, K]
    stacked = stacked[:: max(1, len(stacked) // ROWS)]
    size = fold.shared(statistics.mean_abs).clamp(min=1e-8)
    best, best_alpha, least = torch.ones_like(size), 0.0, float("inf")
    for alpha in ALPHAS:
        scale = size**alpha
        scale = (scale / (scale.max() * scale.min()).sqrt()).clamp(1e-4, 1e4)
        wide = fold.spread(scale)
        change = encode(stacked * wide, statistics.scaled(wide)) / wide - stacked
        error = float((change @ statistics.hessian * change).sum())
        if error < least:
            best, best_alpha, least = scale, alpha, error
    return best, best_alpha


def awq(
    model: nn.Module,
    folds: Sequence[Fold],
    statistics: dict[str, InputStatistics],
    encode: Callable[[str, Tensor, InputStatistics], Tensor],
) -> Mapping[str, float]:
    """Fold scales into the model; return {first linear of each fold: alpha}.

    `encode(name, weight, statistics)` returns the weight of that layer as it will be
    rounded. The model's outputs do not change; `statistics` are rescaled to match the
    new inputs.
    """
    alphas = {}
    for fold in folds:
        first = fold.linears[0]
        known = all(name in statistics for name in fold.linears)
        if not known or statistics[first].tokens == 0:
            continue  # kept in full precision, or no token reached it
        weights = [model.get_parameter(f"{name}.weight") for name in fold.linears]
        judge = partial(encode, first)
        scale, alphas[first] = search_scale(fold, weights, statistics[first], judge)
        fold.apply(model, scale)
        for name in fold.linears:
            statistics[name] = statistics[name].scaled(fold.spread(scale))
    return alphas
