"""Drafters for speculative decoding, by name.

    generate(model, prompt, drafter=make_drafter("lookup", model))

All drafters share one loop, in `labkit.generate`. A new drafter is one file and one line
in `DRAFTERS`. Tests, benchmarks and commands read this table. The name of a number
format, such as "int4_g32_zp", is a drafter, too: the target itself in that format.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from labkit.errors import BadRequest
from labkit.formats.names import is_format
from labkit.formats.recipes import RECIPES
from labkit.generate.drafter import Draft, Drafter
from labkit.model.decoder import Decoder
from labkit.model.load import load
from labkit.speculate.draft_model import DraftModel
from labkit.speculate.fallback import LookupFirst
from labkit.speculate.layer_skip import LayerSkip
from labkit.speculate.lookup import Lookup
from labkit.speculate.self_quantized import SelfQuantized, frequent_ids
from labkit.speculate.trained import load_draft, shipped

# Functions that make a drafter for a target. Some count frequent tokens in the text.
DRAFTERS: dict[str, Callable[[Decoder, str | None], Drafter]] = {
    "lookup": lambda target, text: Lookup(),
    "self_quantized": lambda target, text: SelfQuantized(target),
    "layer_skip": lambda target, text: LayerSkip(target),
    "trimmed": lambda target, text: SelfQuantized(target, ids=frequent_ids(target, text=text)),
    "lookup_first": lambda target, text: LookupFirst(SelfQuantized(target)),
    "draft": lambda target, text: shipped(target),
    "lookup_draft": lambda target, text: LookupFirst(shipped(target)),
}


def make_drafter(name: str, target: Decoder, text: str | None = None) -> Drafter:
    """Return the drafter `name` for `target`.

    `name` is a key of `DRAFTERS`, a number format or recipe (the target itself in it), a
    file made by `labkit distill`, or the folder, GGUF file or hub id of a model. The
    drafter "trimmed" drafts only the most frequent tokens of `text`. Raises BadRequest
    for any other name.
    """
    if name in DRAFTERS:
        return DRAFTERS[name](target, text)
    if name in RECIPES or is_format(name):
        return SelfQuantized(target, name)
    if name.endswith(".safetensors"):
        return load_draft(name, target)
    if "/" in name or name.endswith(".gguf") or Path(name).is_dir():
        model = load(name, dtype=next(target.norm.parameters()).dtype, device=target.device)
        return DraftModel(model, name=name)
    raise BadRequest(
        f"There is no drafter {name!r}; choose one of {', '.join(DRAFTERS)}, a number format, "
        "or a model's folder, file or hub id."
    )


__all__ = [
    "DRAFTERS",
    "Draft",
    "DraftModel",
    "Drafter",
    "LayerSkip",
    "Lookup",
    "LookupFirst",
    "SelfQuantized",
    "frequent_ids",
    "load_draft",
    "make_drafter",
    "shipped",
]
