"""Every parameter of a model, what holds it, and what a recipe makes of it: decided before anything is changed.

Walking only `nn.Linear` is how quantizers miss most of a mixture-of-experts model and say nothing. Here each parameter
is accounted for: linear layers, embeddings, GPT-2's transposed Conv1D, fused expert tensors [experts, N, K], and the
rest (norms, biases, routers) by name with the reason why it keeps its precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import nn

from labkit.errors import BadRequest
from labkit.formats import get_format
from labkit.formats.tensor import finite
from labkit.kernels.packed import PackedWeight, resident_nbytes
from labkit.quant.recipe import Recipe, layer_of

HEADS = ("head", "lm_head", "output", "embed_out", "output_projection")
ROUTERS = ("router", "gate", "shared_expert_gate")


@dataclass(frozen=True)
class Part:
    """One parameter. `kind`: linear | conv1d | embedding | experts | tied | kept."""

    name: str  # of the module (of the parameter where kept or experts)
    kind: str
    part: str  # blocks | head | embedding | other
    shape: tuple[int, ...]  # rows first: [N, K], also for Conv1D
    format: str
    nbytes: int  # resident, predicted; 0 where the bytes are counted under another name
    reason: str = ""
    owner: str = ""  # where tied: the layer whose bytes these are

    @property
    def elements(self) -> int:
        return 0 if self.kind == "tied" else prod(self.shape)

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / self.elements if self.elements else 0.0

    @property
    def quantized(self) -> bool:
        return self.kind != "kept"


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear layer, whose weight is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def survey(model: nn.Module, recipe: Recipe, kernel: str = "auto") -> list[Part]:
    """What quantize_model will do to each parameter, with the bytes it will take."""
    check_overrides(model, recipe)
    layers = [layer_of(name) for name, _ in model.named_modules()]
    num_layers = 1 + max((i for i in layers if i is not None), default=-1)
    parts, owners, done = [], {}, set()
    head = head_name(model)
    # the head before the embedding, so that the embedding is what is "tied"
    modules = sorted(model.named_modules(), key=lambda item: isinstance(item[1], nn.Embedding))
    for name, module in modules:
        weight = module._parameters.get("weight")
        if isinstance(module, nn.Linear) or is_conv1d(module):
            kind = "conv1d" if is_conv1d(module) else "linear"
            shape = tuple(weight.shape[::-1] if kind == "conv1d" else weight.shape)
            part = "head" if name == head else "blocks"
        elif isinstance(module, nn.Embedding):
            kind, shape, part = "embedding", tuple(weight.shape), "embedding"
        else:
            continue
        done.add(id(weight))
        if name.rpartition(".")[2] in ROUTERS and part == "blocks" and shape[0] < shape[1]:
            parts.append(_kept(f"{name}.weight", weight, "a router: few weights that decide much"))
            continue
        format = recipe.format_of(name, part, num_layers)
        if (owner := owners.get(id(weight))) is not None and owner.format == format:
            parts.append(Part(name, "tied", part, shape, format, 0, f"shares the bytes of {owner.name}", owner.name))
            continue
        if get_format(format).kind == "float" and torch.finfo(weight.dtype).bits <= get_format(format).bits:
            reason = (
                f"the recipe keeps it in {format}" if owner is None else f"the recipe keeps it, apart from {owner.name}"
            )
            parts.append(_kept(f"{name}.weight", weight, reason))
            continue
        nbytes = resident_nbytes(get_format(format), shape, weight.device.type, kernel)
        parts.append(
            Part(name, kind, part, shape, format, nbytes, "" if owner is None else f"no longer tied to {owner.name}")
        )
        owners.setdefault(id(weight), parts[-1])
    for name, parameter in model.named_parameters():
        if id(parameter) in done:
            continue
        if parameter.ndim == 3 and parameter.shape[0] > 1:
            format = recipe.format_of(name, "blocks", num_layers)
            if get_format(format).kind != "float":
                nbytes = get_format(format).nbytes(tuple(parameter.shape))
                parts.append(
                    Part(
                        name,
                        "experts",
                        "blocks",
                        tuple(parameter.shape),
                        format,
                        nbytes,
                        "fused experts, unpacked on each use",
                    )
                )
                continue
        parts.append(
            _kept(
                name,
                parameter,
                "a vector" if parameter.ndim < 2 else f"not a linear layer: a {parameter.ndim}-D parameter",
            )
        )
    return parts


def check_overrides(model: nn.Module, recipe: Recipe) -> None:
    """Refuse a pattern that reaches nothing: a misspelt name would leave its layer as it was, in silence."""
    held = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding) or is_conv1d(m)]
    held += [n for n, p in model.named_parameters() if p.ndim == 3]
    for pattern in recipe.overrides:
        if not any(fnmatchcase(name, pattern) for name in held):
            raise BadRequest(
                f"Recipe {recipe.name} overrides {pattern!r} and no layer of this model is called so; "
                f"names are as in {', '.join(held[:3])}."
            )


def _kept(name: str, parameter: nn.Parameter, reason: str) -> Part:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Part(
        name, "kept", "other", tuple(parameter.shape), dtype, parameter.numel() * parameter.element_size(), reason
    )


def head_name(model: nn.Module) -> str | None:
    """The layer that makes logits: what the model says it is, else a linear layer of a usual name at the top."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for name, module in model.named_modules():
        if module is output and output is not None:
            return name
        if (
            output is None
            and isinstance(module, nn.Linear)
            and name.rpartition(".")[2] in HEADS
            and layer_of(name) is None
        ):
            return name
    return None


def missed(parts: list[Part]) -> list[Part]:
    """Parameters with two dimensions or more that no recipe reached: what a walker must not pass over in silence."""
    return [p for p in parts if p.kind == "kept" and p.reason.startswith("not a linear layer")]


def share(parts: list[Part]) -> float:
    """Quantised elements over all that the recipe did not deliberately keep."""
    meant = [p for p in parts if not p.reason.startswith("the recipe keeps")]
    total = sum(p.elements for p in meant)
    return sum(p.elements for p in meant if p.quantized) / total if total else 1.0


def check_weights(model: nn.Module) -> None:
    """Refuse a model without weights, one that was quantised before, and NaN or infinity, by name."""
    for name, module in model.named_modules():
        if isinstance(module, PackedWeight):
            raise BadRequest(
                f"{name.removesuffix('.weight')} is quantised already ({module.format}); "
                "quantise the model that it was made from."
            )
    if not any(parameter.numel() for parameter in model.parameters()):
        raise BadRequest(f"This {type(model).__name__} holds no weights; give a model with linear layers.")
    for name, parameter in model.named_parameters():
        if parameter.device.type != "meta" and not finite(parameter.detach()):
            raise BadRequest(f"{name} contains NaN or infinity; repair the checkpoint before it is quantised.")


def check_survey(parts: list[Part], least_share: float) -> None:
    """Refuse, before hours are spent, what leaves too much of the model as it is."""
    reached = share(parts)
    if reached < least_share:
        worst = sorted(missed(parts) or [p for p in parts if p.kind == "kept"], key=lambda p: -p.elements)[:3]
        names = ", ".join(f"{p.name} {list(p.shape)}" for p in worst)
        raise BadRequest(
            f"Only {reached:.1%} of the weights can be quantised and {least_share:.0%} are asked for, because of {names}; "
            "lower least_share to accept it."
        )
