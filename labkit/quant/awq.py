"""AWQ: multiply important input columns before rounding, and undo it one operation earlier.

Weights that multiply large activations need the finest rounding. AWQ multiplies input
column k of W by s_k and divides the operation that produces x_k by s_k. The product
stays the same, but W is rounded differently. The scales are s = mean|x|^alpha. A search
chooses the alpha from 0 to 1 with the least error on the calibration text,
tr(D H D^T) with D = round(W s) / s - W (see `calibrate`). Source: Lin et al., "AWQ:
activation-aware weight quantization", 2023.

Inference costs nothing more, because the scales are folded into a norm's weight or into
the rows of the preceding linear layer. A `Fold` says which operation precedes which
layers; code that knows the model makes it. If a KV head serves several query heads,
their inputs share a scale.

When it loses: AWQ cannot be used if no linear operation precedes a layer, as after an
activation function. It gains nothing at 8 bits.
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
ROWS = 768  # compare alphas on this number of evenly spaced rows; all rows share the scale


@dataclass(frozen=True)
class Fold:
    """Layers that read the output of the same operation.

    preceding: the name of the operation (a norm or a linear layer).
    linears: the names of the layers.
    rows: the rows (start, stop) of a preceding linear layer that they read; None means
        all.
    repeat, head_dim: each block of `head_dim` rows is repeated for `repeat` query heads,
        as in v before o in grouped-query attention.
    plus_one: whether a preceding norm multiplies by (1 + weight).
    """

    preceding: str
    linears: tuple[str, ...]
    rows: tuple[int, int] | None = None
    repeat: int = 1
    head_dim: int = 1
    plus_one: bool = False

    def shared(self, values: Tensor) -> Tensor:
        """Average `values` [K], one per input, over the query heads of each KV head.

        The result has one value per output of the preceding operation.
        """
        return values.view(-1, self.repeat, self.head_dim).mean(1).flatten()

    def spread(self, values: Tensor) -> Tensor:
        """Repeat `values`, one per preceding output, for the query heads of each KV head."""
        return values.view(-1, 1, self.head_dim).expand(-1, self.repeat, -1).flatten()

    @torch.no_grad()
    def apply(self, model: nn.Module, scale: Tensor) -> None:
        """Divide the preceding outputs by `scale`; multiply the weights that read them.

        The outputs of the model do not change. Raises BadRequest if `scale` has another
        number of values than the preceding operation has outputs.
        """
        module = model.get_submodule(self.preceding)
        weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
        start, stop = self.rows or (0, len(weight))
        if stop - start != len(scale):
            sizes = f"{stop - start} outputs, but there are {len(scale)} scales"
            raise BadRequest(f"{self.preceding} has {sizes}; correct its Fold in `folds`.")
        one = 1 if self.plus_one else 0
        divisor = scale.view(-1, *[1] * (weight.ndim - 1))
        weight[start:stop] = (one + weight[start:stop]) / divisor - one
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

    `encode(weight, statistics)` returns the weight after rounding.
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

    `encode(name, weight, statistics)` returns the weight of a layer after rounding. The
    outputs of the model do not change. `statistics` are rescaled in place to match the
    new inputs. A fold is left out if a layer has no statistics or no token reached it.
    """
    alphas = {}
    for fold in folds:
        first = fold.linears[0]
        known = all(name in statistics for name in fold.linears)
        if not known or statistics[first].tokens == 0:
            continue
        weights = [model.get_parameter(f"{name}.weight") for name in fold.linears]
        rounded = partial(encode, first)
        scale, alphas[first] = search_scale(fold, weights, statistics[first], rounded)
        fold.apply(model, scale)
        for name in fold.linears:
            statistics[name] = statistics[name].scaled(fold.spread(scale))
    return alphas
