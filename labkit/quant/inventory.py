"""List every parameter of a model and the format that a recipe gives it.

Quantizers that visit only `nn.Linear` silently skip most of a mixture-of-experts model.
This module lists every parameter: linear layers, embeddings, GPT-2's transposed Conv1D,
fused expert tensors [experts, N, K], and all others (norms, biases, routers). Each of
the others has a reason why it keeps its precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import nn

from labkit.errors import BadRequest
from labkit.formats import get_format
from labkit.formats.tensor import finite
from labkit.kernels.packed_weight import PackedWeight
from labkit.kernels.registry import resident_nbytes
from labkit.quant.recipe import Recipe, layer_of

HEADS = ("head", "lm_head", "output", "embed_out", "output_projection")
ROUTERS = ("router", "gate", "shared_expert_gate")


@dataclass(frozen=True)
class Part:
    """A parameter. `kind` is linear, conv1d, embedding, experts, tied or kept."""

    name: str  # of the module; of the parameter if `kind` is kept or experts
    kind: str
    part: str  # blocks, head, embedding or other
    shape: tuple[int, ...]  # rows first: [N, K], also for Conv1D
    format: str
    nbytes: int  # predicted resident bytes; 0 if they are counted in `owner`
    reason: str = ""
    owner: str = ""  # the part that shares its bytes with this one

    @property
    def elements(self) -> int:
        return 0 if self.owner else prod(self.shape)

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / self.elements if self.elements else 0.0

    @property
    def quantized(self) -> bool:
        return self.kind != "kept"

    @property
    def calibrated(self) -> bool:
        """Whether methods other than rounding to nearest apply."""
        layer = self.kind in ("linear", "conv1d") and self.part == "blocks"
        return layer and get_format(self.format).kind == "integer"


@dataclass(frozen=True)
class QuantizationReport:
    """The format of each parameter; `nbytes` is exact even before quantization."""

    recipe: Recipe
    method: str
    parts: tuple[Part, ...]
    original_nbytes: int
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def share(self) -> float:
        """Share of quantized elements among those that the recipe does not keep."""
        counted = [p for p in self.parts if not p.reason.startswith("the recipe keeps")]
        total = sum(p.elements for p in counted)
        return sum(p.elements for p in counted if p.quantized) / total if total else 1.0

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / sum(part.elements for part in self.parts)

    def block_bits(self) -> float:
        """Bits per weight, with scales, of the linear layers in the blocks."""
        blocks = [part for part in self.parts if part.part == "blocks"]
        return 8 * sum(part.nbytes for part in blocks) / sum(part.elements for part in blocks)

    def __str__(self) -> str:
        lines = [
            f"{p.name:<44} {[*p.shape]!s:<18} {p.format:<14} {p.bits:6.3f} bits  {p.reason}".rstrip()
            for p in self.parts
        ]
        ratio = self.nbytes / self.original_nbytes
        lines.append(
            f"{self.share:.1%} of the weights quantized, {self.bits_per_weight:.3f} bits per weight "
            f"all-in, {self.nbytes / 2**20:.1f} MiB ({ratio:.3f} of the original)"
        )
        return "\n".join([*lines, *self.notes])

    def check_share(self) -> None:
        """Raise BadRequest if the quantized share is below the recipe's `least_share`."""
        if self.share >= self.recipe.least_share:
            return
        kept = [p for p in self.parts if not p.quantized]
        kept = [p for p in kept if p.reason.startswith("not a linear layer")] or kept
        worst = sorted(kept, key=lambda p: -p.elements)[:3]
        names = ", ".join(f"{p.name} {list(p.shape)}" for p in worst)
        need = f"recipe {self.recipe.name} needs {self.recipe.least_share:.0%}"
        text = f"Only {self.share:.1%} of the weights can be quantized and {need}"
        raise BadRequest(f"{text}, because of {names}; lower its least_share to accept this.")


def parameter_nbytes(model: nn.Module) -> int:
    """Return the bytes of the parameters in their present dtypes."""
    return sum(p.nbytes for p in model.parameters())


def kind_of(module: nn.Module) -> str | None:
    """Return the kind of a layer that can be quantized, or None."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    conv1d = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    return "conv1d" if conv1d else None  # GPT-2's linear layer, whose weight is [K, N]


def survey(model: nn.Module, recipe: Recipe, kernel: str = "auto") -> list[Part]:
    """Return the format and bytes that quantize_model will give each parameter.

    Raises BadRequest if an override of the recipe matches no layer.
    """
    _check_overrides(model, recipe)
    layers = [layer_of(name) for name, _ in model.named_modules()]
    num_layers = 1 + max((i for i in layers if i is not None), default=-1)
    head = head_name(model)
    parts: list[Part] = []
    owners: dict[int, Part] = {}  # id of a weight -> the first part that has it
    # The head comes before the embedding, so the embedding is the one that is "tied".
    modules = sorted(model.named_modules(), key=lambda item: isinstance(item[1], nn.Embedding))
    for name, module in modules:
        kind = kind_of(module)
        if kind is None:
            continue
        weight = module.weight
        shape = tuple(weight.shape[::-1] if kind == "conv1d" else weight.shape)
        place = "head" if name == head else "embedding" if kind == "embedding" else "blocks"
        router = name.rpartition(".")[2] in ROUTERS and place == "blocks" and shape[0] < shape[1]
        format = get_format(recipe.format_of(name, place, num_layers))
        owner = owners.get(id(weight))
        part = Part(name, kind, place, shape, format.name, 0)
        if router:
            part = _kept(f"{name}.weight", weight, "a router: few weights that decide much")
        elif format.kind == "float" and torch.finfo(weight.dtype).bits <= format.bits:
            part = _kept(f"{name}.weight", weight, f"the recipe keeps it in {format.name}")
            if owner is not None and not owner.quantized:
                part = replace(part, nbytes=0, owner=owner.name)
        elif owner is not None and owner.format == format.name:
            reason = f"shares the bytes of {owner.name}"
            part = replace(part, kind="tied", reason=reason, owner=owner.name)
        else:
            nbytes = resident_nbytes(format, shape, weight.device.type, kernel)
            reason = "" if owner is None else f"no longer tied to {owner.name}"
            part = replace(part, nbytes=nbytes, reason=reason)
        owners.setdefault(id(weight), part)
        parts.append(part)
    for name, parameter in model.named_parameters():
        if id(parameter) not in owners:
            parts.append(_bare(name, parameter, recipe, num_layers))
    return parts


def _bare(name: str, parameter: nn.Parameter, recipe: Recipe, num_layers: int) -> Part:
    """Describe a parameter outside of layers: fused experts, or kept unchanged."""
    shape = tuple(parameter.shape)
    format = get_format(recipe.format_of(name, "blocks", num_layers))
    if len(shape) == 3 and shape[0] > 1 and format.kind != "float":
        nbytes, reason = format.nbytes(shape), "fused experts, unpacked on each use"
        return Part(name, "experts", "blocks", shape, format.name, nbytes, reason)
    odd = f"not a linear layer: a {parameter.ndim}-D parameter"
    return _kept(name, parameter, "a vector" if parameter.ndim < 2 else odd)


def _kept(name: str, parameter: nn.Parameter, reason: str) -> Part:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Part(name, "kept", "other", tuple(parameter.shape), dtype, parameter.nbytes, reason)


def _check_overrides(model: nn.Module, recipe: Recipe) -> None:
    """Raise BadRequest if a pattern matches no layer, for example because of a typo."""
    names = [name for name, module in model.named_modules() if kind_of(module)]
    names += [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    for pattern in recipe.overrides:
        if not any(fnmatchcase(name, pattern) for name in names):
            rule = f"Recipe {recipe.name} overrides {pattern!r} and no layer matches"
            raise BadRequest(f"{rule}; names are like {', '.join(names[:3])}.")


def head_name(model: nn.Module) -> str | None:
    """Return the name of the layer that computes the logits, or None."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        usual = name.rpartition(".")[2] in HEADS and layer_of(name) is None
        if module is output or (output is None and isinstance(module, nn.Linear) and usual):
            return name
    return None


def check_weights(model: nn.Module) -> None:
    """Raise BadRequest if the model has no weights, has NaN or infinity, or is quantized."""
    for name, module in model.named_modules():
        if isinstance(module, PackedWeight):
            layer = f"{name.removesuffix('.weight')} is quantized already ({module.format})"
            raise BadRequest(f"{layer}; quantize the model that it was made from.")
    if not any(parameter.numel() for parameter in model.parameters()):
        raise BadRequest(f"This {type(model).__name__} has no weights; give one with layers.")
    for name, parameter in model.named_parameters():
        if parameter.device.type != "meta" and not finite(parameter.detach()):
            raise BadRequest(f"{name} contains NaN or infinity; repair the checkpoint first.")
