"""Quantize one model in many ways and compare each with the original on the same text.

    bench = Trials(model, passages, statistics)
    bench.run("int4_g64_zp", "gptq")        a Trial: bits per weight, KL and top-1 per slice

Only linear layers in the blocks are changed (all, or those of `layers`). Head and
embedding stay and the arithmetic is float32, so a KL is what *the weights* lost. Every
trial starts from a copy of the same weights, uses the same statistics and is scored on
the same passages, by the task `text`; so two trials can be compared passage by passage
(`paired`). `PartLoss` is the loss with only some parts rounded, for a recipe search; it
swaps their weights in place.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.formats import dequantize, round_to_nearest
from labkit.lab.evals.passages import Passage, Remembered, log_probs, plain_read
from labkit.lab.evals.report import results
from labkit.lab.evals.statistics import bootstrap
from labkit.lab.evals.task import ItemScore
from labkit.lab.evals.text import COMPARED, score
from labkit.model.folding import fold_map
from labkit.quant.apply import quantize_model
from labkit.quant.calibrate import Calibration, InputStatistics, device_of
from labkit.quant.linear import unpack_model
from labkit.quant.methods import Method
from labkit.quant.recipe import Recipe, layer_of


@dataclass(frozen=True)
class Trial:
    """`bits` per quantized weight, scales included; `scores` passage by passage."""

    name: str
    method: str
    bits: float
    seconds: float
    scores: tuple[ItemScore, ...]

    def kl(self, slice: str = "all") -> tuple[float, float, float]:
        """Return the KL in nats per token with its 95 % interval.

        With fewer than six passages there is no interval: both ends are the value.
        """
        return self._metric("kl", slice)

    def top1(self, slice: str = "all") -> tuple[float, float, float]:
        return self._metric("top1", slice)

    def _metric(self, metric: str, slice: str) -> tuple[float, float, float]:
        rows = results(COMPARED, "text", self.scores)
        rows = [row for row in rows if (row["slice"], row["metric"]) == (slice, metric)]
        if not rows:
            raise BadRequest(
                f"There is no slice {slice!r} in this trial; it has {sorted({s.slice for s in self.scores})}."
            )
        value, low, high = (rows[0][key] for key in ("value", "low", "high"))
        return (value, value, value) if low is None else (value, low, high)

    def tokens(self, slice: str = "all") -> int:
        return sum(score.n for score in self.scores if slice in ("all", score.slice))


def paired(a: Trial, b: Trial, slice: str = "all") -> tuple[float, float, float]:
    """Return the KL of `a` over the KL of `b`, with a bootstrap interval over passages."""
    sums = [[s.metrics["kl"][0] for s in one.scores if slice in ("all", s.slice)] for one in (a, b)]
    ratio = bootstrap(*sums)
    value, low, high = ratio.value, ratio.low, ratio.high
    return (value, value, value) if low is None else (value, low, high)


class Trials:
    """`layers`: the indices to quantize (None: all); the others stay in float32."""

    def __init__(
        self,
        model: nn.Module,
        passages: Sequence[Passage],
        statistics: Mapping[str, InputStatistics] | None = None,
        layers: Sequence[int] | None = None,
        reference: Remembered | None = None,
    ):
        self.model, self.passages, self.statistics = model, list(passages), statistics
        self.reference = reference or Remembered(model, self.passages)
        count = len(model.layers)
        self.layers = tuple(range(count)) if layers is None else tuple(layers)
        self.kept = {f"layers.{i}.*": "fp32" for i in range(count) if i not in self.layers}

    def recipe(
        self, blocks: str, overrides: Mapping[str, str] = {}, name: str | None = None
    ) -> Recipe:
        """Return a recipe with `blocks` in the chosen layers; `overrides` take precedence."""
        return Recipe(name or blocks, blocks, "fp32", "fp32", overrides={**overrides, **self.kept})

    def run(
        self,
        blocks: str,
        method: str | Method = "rtn",
        *,
        name: str | None = None,
        overrides: Mapping[str, str] = {},
        statistics: Mapping[str, InputStatistics] | None = None,
        layerwise: Calibration | None = None,
    ) -> Trial:
        """Quantize a copy of the model and score it.

        `layerwise` is a text to read again after every layer, instead of statistics.
        """
        method = method if isinstance(method, Method) else Method(method)
        start = time.perf_counter()
        model = copy.deepcopy(self.model)
        folds = (
            [f for f in fold_map(model) if layer_of(f.linears[0]) in self.layers]
            if "awq" in method.parts
            else ()
        )
        calibration = statistics or self.statistics
        if layerwise:
            calibration = replace(layerwise, blocks=model.layers, forward=hidden_states)
        report = quantize_model(
            model,
            self.recipe(blocks, overrides),
            method,
            calibration,
            folds=folds,
            kernel="plain",
        )
        seconds = time.perf_counter() - start
        model = unpack_model(model)
        scores = [score(model, passage, self.reference) for passage in self.passages]
        changed = [p for p in report.parts if p.part == "blocks"]
        bits = 8 * sum(p.nbytes for p in changed) / sum(p.elements for p in changed)
        return Trial(name or f"{blocks} {method.name}", method.name, bits, seconds, tuple(scores))


def parts_by_depth(model: nn.Module, depths: int) -> dict[str, tuple[str, ...]]:
    """Return {"mlp.down 0-9": names}: linear layers by kind and by `depths` ranges of layers."""
    count, found = len(model.layers), {}
    if not 1 <= depths <= count:
        raise BadRequest(f"{depths} ranges of {count} layers are not possible; give 1 to {count}.")
    for name, module in model.named_modules():
        layer = layer_of(name)
        if isinstance(module, nn.Linear) and layer is not None:
            stretch = layer * depths // count
            inside = [i for i in range(count) if i * depths // count == stretch]
            kind = name.split(f".{layer}.", 1)[1]
            found.setdefault(f"{kind} {inside[0]}-{inside[-1]}", []).append(name)
    return {part: tuple(names) for part, names in found.items()}


def hidden_states(model: nn.Module, tokens: Tensor, counts: Sequence[int]) -> Tensor:
    """Run the forward pass of a calibration, which needs no head."""
    return model.hidden_states(tokens)


class _Given(nn.Module):
    """A replacement of an embedding that returns stored vectors."""

    def __init__(self, x: Tensor):
        super().__init__()
        self.x = x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.x


class PartLoss:
    """loss({part: format}): KL in nats per token with only these parts rounded to nearest.

    The model is left as it was. `labkit.quant.recipe.search` takes the loss and
    `shapes()`; `expand` turns its choice into names of layers. Layers below the lowest
    changed one give the same output as before, so each loss starts there from stored
    vectors. The unchanged distributions are stored too (V numbers per token), so keep the
    passages short.
    """

    def __init__(
        self, model: nn.Module, passages: Sequence[Passage], parts: Mapping[str, Sequence[str]]
    ):
        self.model, self.passages, self.parts = model, list(passages), dict(parts)
        self.inputs: dict[str, list[Tensor]] = {}  # passage -> what each layer is given [1, T, E]
        self.known: dict[str, Tensor] = {}  # passage -> log-probabilities [T, V]
        for passage in self.passages:
            seen = self.inputs[passage.id] = []
            hooks = [
                x.register_forward_pre_hook(lambda _, given, to=seen: to.append(given[0]))
                for x in model.layers
            ]
            try:
                with torch.inference_mode():
                    tokens = torch.tensor([passage.tokens], device=device_of(model))
                    self.known[passage.id] = log_probs(*plain_read(model, tokens))
            finally:
                for hook in hooks:
                    hook.remove()

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shape of each part's matrices stacked, from which its bits are counted."""
        found = {}
        for part, names in self.parts.items():
            rows = [self.model.get_submodule(name).weight.shape for name in names]
            if len({shape[1] for shape in rows}) != 1:
                raise BadRequest(
                    f"{part!r} covers matrices of different lengths; make one part per kind of matrix."
                )
            found[part] = (sum(shape[0] for shape in rows), rows[0][1])
        return found

    def expand(self, overrides: Mapping[str, str]) -> dict[str, str]:
        return {name: format for part, format in overrides.items() for name in self.parts[part]}

    def __call__(self, overrides: Mapping[str, str]) -> float:
        changed = self.expand(overrides)
        first = min((layer_of(name) for name in changed), default=0)
        kept = {
            self.model.get_submodule(name): self.model.get_submodule(name).weight.data
            for name in changed
        }
        try:
            for name, format in changed.items():
                module = self.model.get_submodule(name)
                module.weight.data = dequantize(round_to_nearest(module.weight.data, format))
            scores = [self._score(passage, first) for passage in self.passages]
        finally:
            for module, weight in kept.items():
                module.weight.data = weight
        return sum(one.metrics["kl"][0] for one in scores) / sum(one.n for one in scores)

    def _score(self, passage: Passage, first: int) -> ItemScore:
        model, layers, embedding = self.model, self.model.layers, self.model.embed_tokens
        model.layers, model.embed_tokens = layers[first:], _Given(self.inputs[passage.id][first])
        try:
            read = lambda model, tokens: (model.hidden_states(tokens)[0], model.head)  # noqa: E731
            return score(model, passage, lambda passage: (self.known[passage.id], None), read)
        finally:
            model.layers, model.embed_tokens = layers, embedding


def first_token_share(
    seen: Mapping[str, InputStatistics], rest: Mapping[str, InputStatistics]
) -> dict[str, float]:
    """Return {layer: share of its Hessian's trace that the first token of each sequence brings}.

    `seen` is from `collect` with every token, `rest` from the same text without first tokens.
    """
    trace = {
        kind: {name: float(one.hessian.trace()) * one.tokens for name, one in statistics.items()}
        for kind, statistics in (("seen", seen), ("rest", rest))
    }
    return {name: 1 - trace["rest"][name] / trace["seen"][name] for name in seen}
