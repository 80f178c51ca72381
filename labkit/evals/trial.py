"""Many ways to quantise one model, each judged on the same text against the unchanged model.

    bench = Trials(model, passages, statistics)
    bench.run("int4_g64_zp", "gptq")        ->  Trial: bits a weight of the blocks, KL and top-1 a slice, with intervals

Only the linear layers in the blocks are changed (all, or those of `layers`); head and embedding stay, and arithmetic is
float32 throughout, so a KL is what *the weights* lost. Every trial starts from a copy of the same weights, reads the same
statistics, and is scored on the same passages; so two trials can be compared passage by passage (`paired`).
`PartLoss` is what a recipe search is handed: the loss with just some parts rounded, measured by swapping them in place.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.evals.reading import Passage, Remembered, log_probs, plain_read
from labkit.evals.text import PassageScore, evaluate, ratio_interval, results, score
from labkit.formats import dequantize, quantize
from labkit.model.folding import fold_map
from labkit.quant.calibrate import Calibration, InputStatistics, device_of
from labkit.quant.methods import Method
from labkit.quant.recipe import Recipe, layer_of
from labkit.quant.unpack import unpack_model
from labkit.quant.walk import quantize_model


@dataclass(frozen=True)
class Trial:
    """`bits`: all-in, of the quantised linear layers. `scores`: passage by passage."""

    name: str
    method: str
    bits: float
    seconds: float
    scores: tuple[PassageScore, ...]

    def kl(self, slice: str = "all") -> tuple[float, float, float]:
        """Nats a token and its 95 % interval."""
        return self._metric("kl", slice)

    def top1(self, slice: str = "all") -> tuple[float, float, float]:
        return self._metric("top1", slice)

    def _metric(self, metric: str, slice: str) -> tuple[float, float, float]:
        rows = [row for row in results(self.scores) if (row["slice"], row["metric"]) == (slice, metric)]
        if not rows:
            raise BadRequest(f"There is no slice {slice!r} in this trial; it has {sorted({s.slice for s in self.scores})}.")
        value, low, high = (rows[0][key] for key in ("value", "low", "high"))
        return (value, value, value) if low is None else (value, low, high)

    def tokens(self, slice: str = "all") -> int:
        return sum(score.n for score in self.scores if slice in ("all", score.slice))


def paired(a: Trial, b: Trial, slice: str = "all") -> tuple[float, float, float]:
    """How many times b's KL the KL of `a` is, with a bootstrap interval over the passages both have read."""
    rows = [(x.kl, y.kl) for x, y in zip(a.scores, b.scores, strict=True) if slice in ("all", x.slice)]
    value, low, high = ratio_interval([x for x, _ in rows], [y for _, y in rows])
    return (value, value, value) if low is None else (value, low, high)


class Trials:
    """`layers`: the indices that are quantised (None: all); the others stay in float32."""

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

    def recipe(self, blocks: str, overrides: Mapping[str, str] = {}, name: str | None = None) -> Recipe:
        """`blocks` in the layers that are tried; `overrides` before the layers that stay."""
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
        """`layerwise`: no statistics, but this text, read again after every layer (labkit.quant.sequential)."""
        method = method if isinstance(method, Method) else Method(method)
        start = time.perf_counter()
        model = copy.deepcopy(self.model)
        folds = [f for f in fold_map(model) if layer_of(f.linears[0]) in self.layers] if "awq" in method.parts else ()
        report = quantize_model(
            model, self.recipe(blocks, overrides), method, layerwise, folds=folds, kernel="plain",
            statistics=None if layerwise else statistics or self.statistics,
            blocks=model.layers if layerwise else (), forward=hidden_states,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        scores = evaluate(unpack_model(model), self.passages, self.reference)
        changed = [p for p in report.parts if p.part == "blocks"]
        bits = 8 * sum(p.nbytes for p in changed) / sum(p.elements for p in changed)
        return Trial(name or f"{blocks} {method.name}", method.name, bits, seconds, tuple(scores))


def parts_by_depth(model: nn.Module, depths: int) -> dict[str, tuple[str, ...]]:
    """{"mlp.down 0-9": names}: the linear layers in the blocks by kind and by `depths` stretches of layers."""
    count, found = len(model.layers), {}
    if not 1 <= depths <= count:
        raise BadRequest(f"{depths} stretches of {count} layers were asked for; give 1 to {count}.")
    for name, module in model.named_modules():
        layer = layer_of(name)
        if isinstance(module, nn.Linear) and layer is not None:
            stretch = layer * depths // count
            inside = [i for i in range(count) if i * depths // count == stretch]
            kind = name.split(f".{layer}.", 1)[1]
            found.setdefault(f"{kind} {inside[0]}-{inside[-1]}", []).append(name)
    return {part: tuple(names) for part, names in found.items()}


def hidden_states(model: nn.Module, tokens: Tensor, counts: Sequence[int]) -> Tensor:
    """The forward pass of a calibration: what the blocks read needs no head."""
    return model.hidden_states(tokens)


class _Given(nn.Module):
    """In place of an embedding: vectors that are known already."""

    def __init__(self, x: Tensor):
        super().__init__()
        self.x = x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.x


class PartLoss:
    """loss({part: format}): KL in nats a token with just these parts rounded to nearest; the model is left as it was.

    What `labkit.quant.recipe.search` is handed, with `shapes()`; `expand` turns what it chose into names of layers.
    Layers below the lowest changed one give what they gave before, so each loss starts there, from remembered vectors,
    and the unchanged distributions are remembered too (V numbers a token: keep the passages short)."""

    def __init__(self, model: nn.Module, passages: Sequence[Passage], parts: Mapping[str, Sequence[str]]):
        self.model, self.passages, self.parts = model, list(passages), dict(parts)
        self.inputs: dict[str, list[Tensor]] = {}  # passage -> what each layer is given [1, T, E]
        self.known: dict[str, Tensor] = {}  # passage -> log-probabilities [T, V]
        for passage in self.passages:
            seen = self.inputs[passage.id] = []
            hooks = [x.register_forward_pre_hook(lambda _, given, to=seen: to.append(given[0])) for x in model.layers]
            try:
                with torch.inference_mode():
                    tokens = torch.tensor([passage.tokens], device=device_of(model))
                    self.known[passage.id] = log_probs(*plain_read(model, tokens))
            finally:
                for hook in hooks:
                    hook.remove()

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Each part's matrices stacked: what its bits are counted from."""
        found = {}
        for part, names in self.parts.items():
            rows = [self.model.get_submodule(name).weight.shape for name in names]
            if len({shape[1] for shape in rows}) != 1:
                raise BadRequest(f"{part!r} covers matrices of different lengths; make one part a kind of matrix.")
            found[part] = (sum(shape[0] for shape in rows), rows[0][1])
        return found

    def expand(self, overrides: Mapping[str, str]) -> dict[str, str]:
        return {name: format for part, format in overrides.items() for name in self.parts[part]}

    def __call__(self, overrides: Mapping[str, str]) -> float:
        changed = self.expand(overrides)
        first = min((layer_of(name) for name in changed), default=0)
        kept = {self.model.get_submodule(name): self.model.get_submodule(name).weight.data for name in changed}
        try:
            for name, format in changed.items():
                module = self.model.get_submodule(name)
                module.weight.data = dequantize(quantize(module.weight.data, format))
            scores = [self._score(passage, first) for passage in self.passages]
        finally:
            for module, weight in kept.items():
                module.weight.data = weight
        return sum(one.kl for one in scores) / sum(one.n for one in scores)

    def _score(self, passage: Passage, first: int) -> PassageScore:
        model, layers, embedding = self.model, self.model.layers, self.model.embed_tokens
        model.layers, model.embed_tokens = layers[first:], _Given(self.inputs[passage.id][first])
        try:
            read = lambda model, tokens: (model.hidden_states(tokens)[0], model.head)  # noqa: E731
            return score(model, passage, lambda passage: (self.known[passage.id], None), read)
        finally:
            model.layers, model.embed_tokens = layers, embedding
