"""Recipes: which part of a model gets which format, readable, shareable as YAML, and searchable.

    blocks: int4_g64_zp             # every linear layer in the blocks
    head: int8_channel              # a fifth of a small model, and where low bits hurt most
    embedding: int8_channel         # equal to the head: shared with it where the model ties them
    first_layers: {count: 2, format: int8_channel}
    last_layers: {count: 1, format: int8_channel}
    overrides: {"*.mlp.down": int6_g64_zp}       # by name, the last match wins
    method: awq+gptq+clip
    activations: int8_token         # W8A8; only with int8_channel blocks

`search` spends a budget of bits by measurement: the loss it is handed is measured with one part at a time in each
candidate format, and the combination with the least *sum* of losses is taken. That losses add up is an assumption
(interactions are left out); the recipe that comes out is measured as a whole afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

from labkit.errors import BadRequest
from labkit.formats import get_format, get_recipe
from labkit.quant.methods import Method
from labkit.quant.yaml_keys import read_once

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")


@dataclass(frozen=True)
class Ends:
    """The first or last `count` layers, in another format."""

    count: int = 0
    format: str = "int8_channel"

    def __post_init__(self):
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 0:
            raise BadRequest(f"A count of {self.count!r} first or last layers was given; give a whole number, 0 or more.")


@dataclass(frozen=True)
class Recipe:
    """Formats of the parts, exceptions, method; checked when made."""

    name: str
    blocks: str = "int8_channel"
    head: str = "int8_channel"
    embedding: str = "int8_channel"
    first_layers: Ends = Ends()
    last_layers: Ends = Ends()
    overrides: Mapping[str, str] = field(default_factory=dict)
    method: str = "rtn"
    activations: str | None = None

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise BadRequest(f"A recipe is named {self.name!r}; give a text, as in name: five_bits.")
        if not isinstance(self.overrides, Mapping) or not all(isinstance(pattern, str) for pattern in self.overrides):
            raise BadRequest(
                f"Recipe {self.name} has overrides {self.overrides!r}; "
                'give names with their formats, as in {"*.mlp.down": int6_g64_zp}.'
            )
        for part in (
            self.blocks,
            self.head,
            self.embedding,
            self.first_layers.format,
            self.last_layers.format,
            *self.overrides.values(),
        ):
            get_format(part)
        Method(self.method)
        if self.activations not in (None, "int8_token"):
            raise BadRequest(
                f"Activations in {self.activations!r} were asked for; only int8_token (one scale a token, found at run time) exists."
            )
        if self.activations and get_format(self.blocks).name != "int8_channel":
            raise BadRequest(
                f"int8_token activations multiply int8_channel weights, and blocks are {self.blocks}; set blocks: int8_channel."
            )

    def format_of(self, name: str, part: str, num_layers: int) -> str:
        """The format of the layer `name`, which is of `part` "blocks", "head" or "embedding"."""
        chosen = getattr(self, part)
        layer = layer_of(name)
        if part == "blocks" and layer is not None:
            if layer >= num_layers - self.last_layers.count:
                chosen = self.last_layers.format
            if layer < self.first_layers.count:
                chosen = self.first_layers.format
        for pattern, format in self.overrides.items():
            if fnmatchcase(name, pattern):
                chosen = format
        return get_format(chosen).name

    @classmethod
    def named(cls, name: str | Recipe) -> Recipe:
        """fp32, bf16, int8, int4, any format name, or a path to a YAML file."""
        if isinstance(name, Recipe):
            return name
        if str(name).endswith((".yaml", ".yml")):
            return cls.load(name)
        short = get_recipe(name)
        return cls(short.name, short.blocks, short.head, short.embedding)

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """From a YAML file; unknown keys, formats and methods are refused by name."""
        import yaml

        try:
            said = read_once(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            why = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise BadRequest(
                f"The recipe {path} cannot be read ({why}); give a YAML file with keys such as blocks: int4_g64_zp."
            ) from None
        if not isinstance(said, dict):
            raise BadRequest(f"The recipe {path} holds no keys; write lines such as blocks: int4_g64_zp.")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(map(str, set(said) - known)):
            raise BadRequest(
                f"The recipe {path} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}."
            )
        try:
            ends = {
                key: Ends(said[key]["count"], **{k: v for k, v in said[key].items() if k != "count"})
                for key in ("first_layers", "last_layers")
                if key in said
            }
        except (TypeError, KeyError, AttributeError):
            raise BadRequest(
                f"first_layers and last_layers in {path} take count and format, as in {{count: 2, format: int8_channel}}."
            ) from None
        return cls(**({"name": Path(path).stem} | said | ends))

    def save(self, path: str | Path) -> None:
        """To a YAML file, with only what differs from the defaults."""
        import yaml

        plain, always = Recipe("plain"), ("name", "blocks", "head", "embedding")
        said = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name in always or getattr(self, f.name) != getattr(plain, f.name)
        }
        said |= {key: asdict(value) for key, value in said.items() if isinstance(value, Ends)}
        said |= {"overrides": dict(self.overrides)} if self.overrides else {}
        Path(path).write_text(yaml.safe_dump(said, sort_keys=False), encoding="utf-8")


def layer_of(name: str) -> int | None:
    """The layer's index in a module name such as layers.3.mlp.down, or None."""
    match = _LAYER.search(name + ".")
    return int(match[1]) if match else None


def search(
    shapes: Mapping[str, tuple[int, ...]],
    loss: Callable[[Mapping[str, str]], float],
    budget: float,
    candidates: tuple[str, ...] = ("int3_g64_zp", "int4_g64_zp", "int5_g64_zp", "int6_g64_zp", "int8_channel"),
    base: str | Recipe = "fp32",
    name: str = "searched",
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Recipe, dict[str, dict[str, float]]]:
    """The recipe of least predicted loss at no more than `budget` all-in bits a weight over `shapes`.

    `shapes`: part (a layer's name, or a pattern that covers several) -> its weights' shape. `loss(overrides)` measures
    the model with just those overrides. Returns the recipe and the sensitivities {part: {format: loss}}: the map.
    """
    if not shapes:
        raise BadRequest("No part was given to search over; pass the shapes of the layers, by name.")
    bits = {part: {c: get_format(c).nbytes(shape) * 8 for c in candidates} for part, shape in shapes.items()}
    elements = sum(prod(shape) for shape in shapes.values())
    least = sum(min(costs.values()) for costs in bits.values())
    if least > budget * elements:
        raise BadRequest(
            f"{budget:g} bits a weight were given, but the smallest candidates already take {least / elements:.3f}; raise the budget or add a smaller format."
        )
    sensitivity: dict[str, dict[str, float]] = {}
    for part in shapes:
        sensitivity[part] = {c: float(loss({part: c})) for c in candidates}
        progress(f"{part}: " + ", ".join(f"{c} {value:.4f}" for c, value in sensitivity[part].items()))
    chosen = spend(bits, sensitivity, budget * elements)
    base = Recipe.named(base)
    return Recipe(name, base.blocks, base.head, base.embedding, overrides=chosen), sensitivity


def spend(
    bits: Mapping[str, Mapping[str, int]], losses: Mapping[str, Mapping[str, float]], budget: float
) -> dict[str, str]:
    """Choose one format a part: least total loss within `budget` bits.

    Start from the smallest; repeatedly buy the upgrade with the largest loss saved per bit (the lower convex hull of each
    part), then spend what is left on any single upgrade that still fits."""
    chosen = {part: min(costs, key=lambda c: (costs[c], losses[part][c])) for part, costs in bits.items()}
    left = budget - sum(bits[part][c] for part, c in chosen.items())
    while True:
        best = None
        for part, current in chosen.items():
            for candidate, cost in bits[part].items():
                extra, saved = cost - bits[part][current], losses[part][current] - losses[part][candidate]
                if saved <= 0 or extra > left:
                    continue
                worth = saved / max(extra, 1e-9)
                if best is None or worth > best[0]:
                    best = (worth, part, candidate, extra)
        if best is None:
            return chosen
        _, part, candidate, extra = best
        chosen[part], left = candidate, left - extra
