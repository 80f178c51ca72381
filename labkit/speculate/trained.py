"""Save and load trained drafts: safetensors in bfloat16, with a training record.

Embedding and head belong to the target and are not in the file, so a draft of the default
model has 8 MB. `shipped` loads the draft that comes with labkit. Its recipe, training
record and acceptance are in data/draft.json.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open

from labkit.errors import BadRequest
from labkit.files import data_path, save_tensors
from labkit.generate.drafter import Drafter
from labkit.model.decoder import Decoder
from labkit.speculate.borrowed import Borrower
from labkit.speculate.hidden_state import HiddenState, HiddenStateNet
from labkit.speculate.medusa import Medusa, MedusaNet

KINDS = {"hidden_state": (HiddenStateNet, HiddenState), "medusa": (MedusaNet, Medusa)}
MAKE = "`labkit distill`"


def save_draft(net: Borrower, path: Path, about: dict | None = None) -> int:
    """Write a net to a file, completely or not at all; return the size in bytes.

    `about` is the training record.
    """
    kind = next(name for name, (net_type, _) in KINDS.items() if type(net) is net_type)
    state = net.state_dict()
    tensors = {name: t.bfloat16() if t.dim() > 1 else t for name, t in state.items()}
    return save_tensors(path, tensors, {"kind": kind, "about": json.dumps(about or {})})


def check_output(path: Path) -> None:
    """Raise BadRequest if a draft cannot be written to `path`; call this before training."""
    if path.is_dir():
        raise BadRequest(f"{path} is a folder; give the name of a file to write.")
    if path.exists() and _metadata(path).get("kind") not in KINDS:
        raise BadRequest(
            f"{path} is not a draft made by {MAKE} and is not replaced; choose another name."
        )
    folder = next(folder for folder in path.resolve().parents if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise BadRequest(f"{folder} cannot be written to; choose another place for {path.name}.")


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def load_draft(path: str | Path, target: Decoder) -> Drafter:
    """Read a drafter for `target` from a file.

    Raises BadRequest if the file is not a draft, is damaged, or was made for another
    model.
    """
    path = Path(path)
    if not path.is_file():
        raise BadRequest(f"There is no draft {str(path)!r}; give a file made by {MAKE}.")
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        why = f"{path.name} is not a whole safetensors file ({error})"
        raise BadRequest(f"{why}; make it again with {MAKE}.") from None
    kind = _metadata(path).get("kind")
    if kind not in KINDS or "ids" not in tensors:
        raise BadRequest(f"{path.name} has no draft of a known kind; give a file made by {MAKE}.")
    net_type, drafter = KINDS[kind]
    net = net_type(target.config, tensors["ids"])
    try:
        net.load_state_dict(tensors)
    except RuntimeError:
        raise BadRequest(
            f"{path.name} is for a model of another shape than {target.name}; make one with {MAKE}."
        ) from None
    return drafter(net.to(target.device).requires_grad_(False).eval(), target)


def shipped(target: Decoder) -> Drafter:
    """Return the draft of the default model that comes with labkit.

    Raises BadRequest for any other target, or if the file is missing.
    """
    return load_draft(data_path("draft.safetensors"), target)


def about_shipped() -> dict:
    """Return the recipe, training record and acceptance of the shipped draft."""
    return json.loads(data_path("draft.json").read_text(encoding="utf-8"))


def read_about(path: Path) -> dict:
    """Return the training record of a draft file."""
    return json.loads(_metadata(path).get("about", "{}"))
