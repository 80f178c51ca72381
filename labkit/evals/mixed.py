"""What each part of a model would lose in each format, from one measurement a part.

    loss(part, format) = KL of the model with only this part in `measured`  *  tr(D H D^T) of format / that of measured

The KL says how much the model minds an error in this place; the error of the part's own outputs on a calibration text
says how much smaller another format makes it (KL grows with its square near the optimum). So nine candidates cost one
run of the model a part, and not nine. The rule of four (a bit less is four times the loss) is the same without H; it
cannot tell groups of 64 from groups of 128, or a matrix with outliers from one without.
Fails at 3 bits and below, where "near the optimum" is no longer true.

The text must be of many documents. Measured on the first 128 tokens of two, the recipe it led to at 5 bits lost 1.1 times
what int5_g64_zp loses; on 32 documents, 0.97 times (default model, other text). What parts lose does not quite add up
either, and that cannot be bought back: exchanging formats in the mixed model, by the gradient of its KL on 768 tokens,
lowered the KL by 15 % on those tokens and by nothing on others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from labkit.evals.reading import Passage, cut
from labkit.evals.trial import PartLoss
from labkit.formats import quantize
from labkit.quant.calibrate import InputStatistics
from labkit.quant.recipe import search
from labkit.quant.rtn import error
from labkit.texts import calibration_documents

CANDIDATES = (
    "int3_g64_zp", *(f"int4_g{group}_zp" for group in (32, 64, 96, 128, 192)),
    *(f"int{bits}_g{group}_zp" for bits in (5, 6) for group in (64, 96, 128, 192)),
    "int7_g128_zp", "int7_g192_zp", "int8_channel",
)  # fmt: skip
PASSAGES, TOKENS = 16, 96  # of calibration text, a kind


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


def calibration_passages(tokenizer, kind: str, seed: int, count: int = PASSAGES, tokens: int = TOKENS) -> list[Passage]:
    """`count` passages of calibration text from as many documents: every third a document's beginning, the others
    from further and further in, so that headers, bodies and ends are all read."""
    found: list[Passage] = []
    for document in calibration_documents(kind, seed):
        start = len(document.text) * len(found) // count if len(found) % 3 else 0
        text = document.text[start : start + 6 * tokens + 200]  # enough for one passage
        whole = [p for p in cut([(document.name, text)], kind, tokenizer, tokens, tokens) if len(p.tokens) == tokens]
        found += whole[:1]
        if len(found) == count:
            break
    return found


def mixed_formats(
    loss: PartLoss, statistics: Mapping[str, InputStatistics], budget: float, candidates=CANDIDATES
) -> dict[str, str]:
    """{layer: format} within `budget` bits a weight, all-in."""
    found, _ = search(loss.shapes(), by_output_error(loss, statistics), budget, candidates)
    return loss.expand(found.overrides)
