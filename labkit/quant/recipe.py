"""Recipes: the format of each part of a model, with YAML files and a search.

    blocks: int4_g64_zp             # every linear layer in the blocks
    head: int8_channel              # the head loses most from few bits
    embedding: int8_channel         # with the head's format, a tied weight is stored once
    first_layers: {count: 2, format: int8_channel}    # comes before last_layers
    last_layers: {count: 1, format: int8_channel}
    overrides: {"*.mlp.down": int6_g64_zp}            # by name; the last match counts
    method: awq+gptq+clip
    activations: int8_token         # W8A8; only with int8_channel blocks

`search` chooses formats within a budget of bits. It measures the loss with one part at
a time in each candidate format, and takes the combination with the least *sum* of
losses. This ignores interactions between parts, so measure the resulting recipe as a
whole afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from labkit.errors import BadRequest, Number, OneOf, OrNone, Rule, Text, Whole, check_fields
from labkit.formats import get_format, get_recipe
from labkit.quant.methods import Method

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")
_OVERRIDES = Rule(
    'names with their formats, as in {"*.mlp.down": int6_g64_zp}',
    lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value),
)
EXAMPLE = "blocks: int4_g64_zp"
CANDIDATES = ("int3_g64_zp", "int4_g64_zp", "int5_g64_zp", "int6_g64_zp", "int8_channel")


@dataclass(frozen=True)
class Ends:
    """A format for the first or last `count` layers."""

    count: int
    format: str = "int8_channel"

    def __post_init__(self):
        check_fields(self, count=Whole(0))
        get_format(self.format)


@dataclass(frozen=True)
class Recipe:
    """The formats of a model's parts, the exceptions, and the method.

    `least_share` is the minimum share of a model's weights that must be quantized. If
    fewer can be, quantization raises BadRequest.
    """

    name: str
    blocks: str = "int8_channel"
    head: str = "int8_channel"
    embedding: str = "int8_channel"
    first_layers: Ends = Ends(0)
    last_layers: Ends = Ends(0)
    overrides: Mapping[str, str] = field(default_factory=dict)
    method: str = "rtn"
    activations: str | None = None
    least_share: float = 0.9

    def __post_init__(self):
        activations = OrNone(OneOf("int8_token"))
        check_fields(self, name=Text(), overrides=_OVERRIDES, activations=activations)
        check_fields(self, least_share=Number(0, 1))
        for format in (self.blocks, self.head, self.embedding, *self.overrides.values()):
            get_format(format)
        Method(name=self.method)
        if self.activations and get_format(self.blocks).name != "int8_channel":
            raise BadRequest(f"int8_token activations need int8_channel blocks, not {self.blocks}.")

    @property
    def only_casts(self) -> bool:
        """Whether every part gets the same float format, so that no layer is replaced."""
        exceptions = self.overrides or self.first_layers.count or self.last_layers.count
        same = {self.blocks, self.head, self.embedding} == {self.blocks}
        return same and get_format(self.blocks).kind == "float" and not exceptions

    def format_of(self, name: str, part: str, num_layers: int) -> str:
        """Return the format of a layer. `part` is "blocks", "head" or "embedding"."""
        format = getattr(self, part)
        layer = layer_of(name)
        if part == "blocks" and layer is not None:
            if layer >= num_layers - self.last_layers.count:
                format = self.last_layers.format
            if layer < self.first_layers.count:
                format = self.first_layers.format
        for pattern, override in self.overrides.items():
            if fnmatchcase(name, pattern):
                format = override
        return get_format(format).name

    @classmethod
    def named(cls, name: str | Path | Recipe) -> Recipe:
        """Return a recipe by name (fp32, bf16, int8, int4), format name or YAML file."""
        if isinstance(name, Recipe):
            return name
        if str(name).endswith((".yaml", ".yml")):
            return cls.load(name)
        short = get_recipe(str(name))
        return cls(short.name, short.blocks, short.head, short.embedding)

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a YAML file. Raises BadRequest if its content is not a valid recipe."""
        values = _read_yaml(path)
        if not isinstance(values, dict):
            raise BadRequest(f"The recipe {path} contains no keys; write lines as in {EXAMPLE}.")
        known = sorted(field.name for field in fields(cls))
        if unknown := sorted(map(str, set(values) - set(known))):
            choices = ", ".join(known)
            raise BadRequest(
                f"The recipe {path} has the unknown key {unknown[0]!r}; use {choices}."
            )
        for key in {"first_layers", "last_layers"} & set(values):
            try:
                values[key] = Ends(**values[key])
            except TypeError:
                example = "give count and format, as in {count: 2, format: int8_channel}"
                raise BadRequest(f"{key} in {path} is {values[key]!r}; {example}.") from None
        values.setdefault("name", Path(path).stem)
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write a YAML file with the name, the parts and all non-default fields."""
        import yaml

        values, plain = asdict(self), asdict(Recipe("plain"))
        always = ("name", "blocks", "head", "embedding")
        lines = {k: v for k, v in values.items() if k in always or v != plain[k]}
        Path(path).write_text(yaml.safe_dump(lines, sort_keys=False), encoding="utf-8")


def _read_yaml(path: str | Path) -> Any:
    """Parse a YAML file. Raises BadRequest also for a repeated key, unlike PyYAML."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            # "<<" merges another mapping's keys and is not a key itself
            plain = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            keys = [self.construct_object(key, deep=True) for key in plain]
            if twice := [key for i, key in enumerate(keys) if key in keys[:i]]:
                raise ValueError(f"the key {twice[0]!r} is given twice")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        text = f"The recipe {path} cannot be read ({reason})"
        raise BadRequest(f"{text}; give a YAML file with lines as in {EXAMPLE}.") from None


def layer_of(name: str) -> int | None:
    """Return the layer's index in a module name such as layers.3.mlp.down, or None."""
    match = _LAYER.search(name + ".")
    return int(match[1]) if match else None


def search(
    shapes: Mapping[str, tuple[int, ...]],
    loss: Callable[[Mapping[str, str]], float],
    budget: float,
    candidates: tuple[str, ...] = CANDIDATES,
    base: str | Recipe = "fp32",
    name: str = "searched",
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Recipe, dict[str, dict[str, float]]]:
    """Find the recipe with the least predicted loss within `budget` bits per weight.

    The budget includes scales and zero points. `shapes` maps each part (the name of a
    layer, or a pattern for several layers) to the shape of its weights.
    `loss(overrides)` measures the model with only those overrides. Returns the recipe
    and the sensitivities {part: {format: loss}}. Raises BadRequest if the budget is too
    small.
    """
    if not shapes:
        raise BadRequest("shapes is empty; give the shapes of the layers by name.")
    bits = {
        part: {c: get_format(c).nbytes(shape) * 8 for c in candidates}
        for part, shape in shapes.items()
    }
    elements = sum(prod(shape) for shape in shapes.values())
    least = sum(min(costs.values()) for costs in bits.values())
    if least > budget * elements:
        bound = f"{least / elements:.3f}, the bits of the smallest candidates"
        raise BadRequest(f"The budget is {budget:g} bits per weight; give at least {bound}.")
    sensitivity: dict[str, dict[str, float]] = {}
    for part in shapes:
        losses = sensitivity[part] = {c: float(loss({part: c})) for c in candidates}
        progress(f"{part}: " + ", ".join(f"{c} {value:.4f}" for c, value in losses.items()))
    chosen = spend(bits, sensitivity, budget * elements)
    base = Recipe.named(base)
    return Recipe(name, base.blocks, base.head, base.embedding, overrides=chosen), sensitivity


def spend(
    bits: Mapping[str, Mapping[str, int]], losses: Mapping[str, Mapping[str, float]], budget: float
) -> dict[str, str]:
    """Choose one format per part for the least total loss within `budget` bits.

    Start from the smallest formats. Repeatedly make the upgrade that saves the most
    loss per bit (the lower convex hull of each part) until none of them fits.
    """
    chosen = {
        part: min(costs, key=lambda c: (costs[c], losses[part][c])) for part, costs in bits.items()
    }
    left = budget - sum(bits[part][c] for part, c in chosen.items())
    while True:
        upgrades = []
        for part, current in chosen.items():
            for candidate, cost in bits[part].items():
                extra = cost - bits[part][current]
                saved = losses[part][current] - losses[part][candidate]
                if saved > 0 and extra <= left:
                    upgrades.append((saved / max(extra, 1e-9), part, candidate, extra))
        if not upgrades:
            return chosen
        _, part, chosen[part], extra = max(upgrades, key=lambda upgrade: upgrade[0])
        left -= extra
