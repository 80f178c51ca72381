"""AWQ: make the inputs that matter large before rounding, and pay for it in the operation before.

Weights that multiply large activations should be rounded finest. Multiply input column k of W by s_k and divide what
produces x_k by s_k: the product is the same, W's rounding is not. The scales are s = mean|x|^alpha, alpha in 0 .. 1 by
trying, each judged on the calibration text by tr(D H D^T) with D = round(W s) / s - W (see calibrate).
Source: Lin et al., "AWQ: activation-aware weight quantization", 2023.

Folded into a norm's weight or the rows of the preceding linear layer, it costs nothing in use. What precedes what is a
`Fold`, handed in by whoever knows the model. Where a KV head serves several query heads, their inputs share a scale.
Loses where nothing precedes linearly (after an activation function) and at 8 bits, where there is nothing to gain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.quant.calibrate import InputStatistics

ALPHAS = tuple(i / 10 for i in range(11))
ROWS = 768  # judged on this many rows, evenly spread: the scale is shared by all, and rows are alike


@dataclass(frozen=True)
class Fold:
    """`linears` all read what `preceding` writes. Rows `rows` of it (a linear layer; None: all) are their inputs;
    each block of `head_dim` rows is repeated for `repeat` query heads (grouped-query attention's v before o)."""

    preceding: str
    linears: tuple[str, ...]
    rows: tuple[int, int] | None = None
    repeat: int = 1
    head_dim: int = 1
    plus_one: bool = False  # norms that multiply by (1 + weight)

    def shared(self, values: Tensor) -> Tensor:
        """[K] of the linears' inputs -> one value for each of the preceding outputs (mean over query heads)."""
        return values.view(-1, self.repeat, self.head_dim).mean(1).flatten() if self.repeat > 1 else values

    def spread(self, values: Tensor) -> Tensor:
        """The inverse: one value an output -> one for every input of the linears."""
        if self.repeat == 1:
            return values
        return values.view(-1, 1, self.head_dim).expand(-1, self.repeat, -1).flatten()

    def apply(self, model: nn.Module, scale: Tensor) -> None:
        """Divide what is written by `scale` [outputs], multiply what reads it. The model computes the same."""
        module = model.get_submodule(self.preceding)
        start, stop = self.rows or (0, module.weight.shape[0])
        if stop - start != len(scale):
            raise BadRequest(
                f"{self.preceding} writes {stop - start} values there, but {len(scale)} scales are to be folded; correct the map."
            )
        with torch.no_grad():
            if self.plus_one:
                module.weight[start:stop] = (1 + module.weight[start:stop]) / scale - 1
            else:
                module.weight[start:stop] /= scale.view(-1, *[1] * (module.weight.ndim - 1))
            if getattr(module, "bias", None) is not None:
                module.bias[start:stop] /= scale
            for name in self.linears:
                model.get_submodule(name).weight *= self.spread(scale)


def search_scale(
    fold: Fold,
    weights: list[Tensor],
    statistics: InputStatistics,
    encode: Callable[[Tensor, InputStatistics], Tensor],
) -> tuple[Tensor, float]:
    """The best scale [outputs of the fold] and its alpha. `encode(weight, statistics)` -> the weight as it would be held."""
    stacked = torch.cat([w.detach().float() for w in weights])  # [N, K]
    stacked = stacked[:: max(1, len(stacked) // ROWS)]
    size = fold.shared(statistics.mean_abs).clamp(min=1e-8)
    best = (torch.ones_like(size), 0.0, float("inf"))
    for alpha in ALPHAS:
        scale = size**alpha
        scale = (scale / (scale.max() * scale.min()).sqrt()).clamp(1e-4, 1e4)
        wide = fold.spread(scale)
        change = encode(stacked * wide, statistics.scaled(wide)) / wide - stacked
        error = float((change @ statistics.hessian * change).sum())
        if error < best[2]:
            best = (scale, alpha, error)
    return best[:2]


def awq(model: nn.Module, folds: list[Fold], statistics: Mapping[str, InputStatistics], encode) -> dict[str, float]:
    """Fold scales into the model, in the order given, and rescale the statistics -> alpha of every fold.

    `encode(name, weight, statistics)` is how that layer will be rounded. The model's outputs do not change."""
    chosen = {}
    for fold in folds:
        known = [name for name in fold.linears if name in statistics]
        if len(known) != len(fold.linears) or statistics[known[0]].tokens == 0:
            continue  # kept in full precision, or never reached
        weights = [model.get_submodule(name).weight for name in fold.linears]
        scale, alpha = search_scale(fold, weights, statistics[known[0]], lambda w, s, n=known[0]: encode(n, w, s))
        fold.apply(model, scale)
        for name in fold.linears:
            statistics[name] = statistics[name].scaled(fold.spread(scale))
        chosen[fold.linears[0]] = alpha
    return chosen
