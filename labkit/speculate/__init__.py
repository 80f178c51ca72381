"""Speculative decoding: drafters by name, and the loop that they share.

A new drafter is one file and one line here: a function that makes it for a target. Tests, benches and commands read this
table. The name of a number format, such as "int4_g32_zp", is a drafter too: the target itself in that format.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from labkit.errors import BadRequest
from labkit.formats.names import is_format
from labkit.formats.recipes import RECIPES
from labkit.model.load import load_model
from labkit.speculate.draft import NOTHING, Draft, Drafter
from labkit.speculate.draft_model import DraftModel
from labkit.speculate.layer_skip import LayerSkip
from labkit.speculate.lookup import Lookup
from labkit.speculate.lookup_first import LookupFirst
from labkit.speculate.loop import DrafterFailed, decode, generate
from labkit.speculate.report import Speculated
from labkit.speculate.self_quantized import SelfQuantized
from labkit.speculate.trained import load_draft, shipped
from labkit.speculate.trimmed import frequent_ids

DRAFTERS: dict[str, Callable[..., Drafter]] = {  # name -> what makes it for a target
    "lookup": lambda target: Lookup(),
    "self_quantized": SelfQuantized,
    "layer_skip": LayerSkip,
    "trimmed": lambda target: SelfQuantized(target, ids=frequent_ids(target)),
    "lookup_first": lambda target: LookupFirst(SelfQuantized(target)),
    "draft": shipped,
    "lookup_draft": lambda target: LookupFirst(shipped(target)),
}


def make_drafter(name: str, target) -> Drafter:
    """The drafter of that name for `target`; a number format is the target itself in it, a file of `labkit distill` a trained
    draft, another path or hub id a model."""
    if name in DRAFTERS:
        return DRAFTERS[name](target)
    if name in RECIPES or is_format(name):
        return SelfQuantized(target, name)
    if name.endswith(".safetensors"):
        return load_draft(name, target)
    if "/" in name or name.endswith(".gguf") or Path(name).is_dir():
        return DraftModel(load_model(name, dtype=target.norm.weight.dtype, device=target.device), name=name)
    raise BadRequest(f"There is no drafter {name!r}; choose one of {', '.join(DRAFTERS)}, a number format such as int4_g32_zp, "
                     "or a model's folder, file or hub id.")


__all__ = ["DRAFTERS", "NOTHING", "Draft", "DraftModel", "Drafter", "DrafterFailed", "LayerSkip", "Lookup", "LookupFirst",
           "SelfQuantized", "Speculated", "decode", "frequent_ids", "generate", "load_draft", "make_drafter", "shipped"]
