"""What each part of a model would lose in each format, from one measurement a part.

    loss(part, format) = KL of the model with only this part in `measured`  *  tr(D H D^T) of format / that of measured

The KL says how much the model minds an error in this place; the error of the part's own outputs on a calibration text
says how much smaller another format makes it (KL grows with its square near the optimum). So nine candidates cost one
run of the model a part, and not nine. The rule of four (a bit less is four times the loss) is the same without H; it
cannot tell groups of 64 from groups of 128, or a matrix with outliers from one without.
Fails at 3 bits and below, where "near the optimum" is no longer true.

Errors of different parts add to one another or cancel, and measuring each alone cannot see it. With e the errors of all
parts together and F the curvature, KL = e F e / 2; so exchanging one part's format changes it by

    g d + d F d / 2,   d = the part's change of weights,   g = F e = the gradient of the KL in the mixed model

where g is one backward pass for all parts, and the second term, of two independent roundings, is what they lose alone,
summed. `refine` makes the best such exchanges, a few at a time, and keeps them if the KL measured did fall.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import torch
from torch import Tensor, nn

from labkit.evals.reading import device_of, log_probs, plain_read
from labkit.evals.trial import PartLoss
from labkit.formats import dequantize, get_format, quantize
from labkit.quant.calibrate import InputStatistics
from labkit.quant.recipe import search, spend
from labkit.quant.rtn import error

CANDIDATES = (
    "int3_g64_zp", "int4_g128_zp", "int4_g64_zp", "int4_g32_zp", "int5_g128_zp", "int5_g64_zp", "int6_g128_zp",
    "int6_g64_zp", "int8_channel",
)  # fmt: skip


def by_output_error(
    loss: PartLoss, statistics: Mapping[str, InputStatistics], measured: str = "int4_g64_zp"
) -> Callable[[Mapping[str, str]], float]:
    """What `search` may be handed in place of `loss`: {part: format} -> nats, for one part at a time."""
    alone = {part: loss({part: measured}) for part in loss.parts}

    def output_error(part: str, format: str) -> float:
        total = 0.0
        for name in loss.parts[part]:
            weight = loss.model.get_submodule(name).weight.detach()
            total += weight.shape[0] * error(weight, quantize(weight, format), statistics[name].hessian)
        return total

    unit = {part: output_error(part, measured) for part in loss.parts}

    def estimate(overrides: Mapping[str, str]) -> float:
        ((part, format),) = overrides.items()
        return alone[part] * output_error(part, format) / unit[part] if unit[part] else 0.0

    return estimate


def mixed_formats(
    loss: PartLoss, statistics: Mapping[str, InputStatistics], budget: float, candidates=CANDIDATES, rounds: int = 8
) -> dict[str, str]:
    """{layer: format} within `budget` bits a weight, all-in."""
    found, alone = search(loss.shapes(), by_output_error(loss, statistics), budget, candidates)
    return loss.expand(refine(loss, found.overrides, alone, budget, rounds))


def refine(
    loss: PartLoss,
    formats: Mapping[str, str],
    alone: Mapping[str, Mapping[str, float]],
    budget: float,
    rounds: int = 8,
    moves: int = 16,
) -> dict[str, str]:
    """`formats` by part, exchanged `moves` at a time where that lowers the KL of the whole; fewer after a failure."""
    shapes = loss.shapes()
    bits = {part: {c: 8 * get_format(c).nbytes(shapes[part]) for c in losses} for part, losses in alone.items()}
    budget *= sum(prod(shape) for shape in shapes.values())
    tried, best = dict(formats), None
    for _ in range(rounds):
        kl, changes = exchanges(loss, tried, alone)
        if best is None or kl < best[0]:
            best = (kl, tried, changes)
        elif (moves := moves // 2) == 0:
            break
        _, held, changes = best
        wanted = spend(bits, changes, budget)
        worth = lambda part: -abs(changes[part][wanted[part]])  # noqa: B023, E731
        free = sorted((part for part in wanted if wanted[part] != held[part]), key=worth)[:moves]
        open_to = {part: changes[part] if part in free else {held[part]: 0.0} for part in held}
        tried = spend({part: {c: bits[part][c] for c in some} for part, some in open_to.items()}, open_to, budget)
        if tried == held:
            break
    return best[1]


def exchanges(
    loss: PartLoss, formats: Mapping[str, str], alone: Mapping[str, Mapping[str, float]]
) -> tuple[float, dict[str, dict[str, float]]]:
    """The KL with all parts in `formats`, and {part: {other format: by how much it would change}}."""
    model, layers = loss.model, loss.expand(formats)
    modules = {name: model.get_submodule(name) for name in layers}
    kept = {name: module.weight for name, module in modules.items()}
    rounded = lambda name, format: dequantize(quantize(kept[name].detach(), format))  # noqa: E731
    try:
        for name, module in modules.items():
            module.weight = nn.Parameter(rounded(name, layers[name]))
        kl, slopes = gradients(loss, {name: module.weight for name, module in modules.items()})
        found: dict[str, dict[str, float]] = {}
        for part, held in formats.items():
            found[part] = {held: 0.0}
            for other in set(alone[part]) - {held}:
                moved = {n: rounded(n, other) - modules[n].weight.detach() for n in loss.parts[part]}
                first = sum(float((slopes[n] * change).sum()) for n, change in moved.items())
                found[part][other] = first + alone[part][held] + alone[part][other]
        return kl, found
    finally:
        for name, module in modules.items():
            module.weight = kept[name]


def gradients(loss: PartLoss, weights: Mapping[str, nn.Parameter]) -> tuple[float, dict[str, Tensor]]:
    """The mean KL to the unchanged model, and its gradient by the weights the model has now."""
    scored = sum(len(one.tokens) - one.first for one in loss.passages)
    total, slopes = 0.0, {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for passage in loss.passages:
        rows = slice(passage.first - 1, len(passage.tokens) - 1)
        with torch.enable_grad():
            states, head = plain_read(loss.model, torch.tensor([passage.tokens], device=device_of(loss.model)))
            p, q = loss.known[passage.id][rows].clone(), log_probs(states[rows], head)
            kl = (p.exp() * (p - q)).sum() / scored
            for slope, more in zip(slopes.values(), torch.autograd.grad(kl, list(weights.values())), strict=True):
                slope.add_(more)
        total += float(kl.detach())
    return total, slopes
