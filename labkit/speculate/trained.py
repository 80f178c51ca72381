"""Trained drafts as files: safetensors in bfloat16, with their training record.

Embedding and head are the target's and are not in the file, so a draft of the default
model is 8 MB. `shipped` is the one that comes with labkit; its recipe, training record
and acceptance are in data/draft.json.
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
    """Write a net, whole or not at all; return the file's bytes.

    `about`: how it was made.
    """
    kind = next(name for name, (made, _) in KINDS.items() if type(net) is made)
    state = net.state_dict()
    tensors = {name: held.bfloat16() if held.dim() > 1 else held for name, held in state.items()}
    return save_tensors(path, tensors, {"kind": kind, "about": json.dumps(about or {})})


def check_output(path: Path) -> None:
    """Raise BadRequest before hours are spent, if a draft cannot be written to `path`."""
    if path.is_dir():
        raise BadRequest(f"{path} is a folder; give the name of a file to write.")
    if path.exists() and _metadata(path).get("kind") not in KINDS:
        raise BadRequest(
            f"{path} exists and is not a draft made by {MAKE}, so it is not replaced; "
            "choose another name."
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
    """Return the drafter in a file, for `target`.

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
        raise BadRequest(
            f"{path.name} is not a whole safetensors file ({error}); make it again with {MAKE}."
        ) from None
    kind = _metadata(path).get("kind")
    if kind not in KINDS or "ids" not in tensors:
        raise BadRequest(
            f"{path.name} has no draft of a known kind ({', '.join(KINDS)}); "
            f"give a file made by {MAKE}."
        )
    made, drafter = KINDS[kind]
    net = made(target.config, tensors["ids"])
    try:
        net.load_state_dict(tensors)
    except RuntimeError:
        raise BadRequest(
            f"{path.name} was trained for a model of another shape than {target.name}; "
            f"use one made for it by {MAKE}."
        ) from None
    return drafter(net.to(target.device).requires_grad_(False).eval(), target)


def shipped(target: Decoder) -> Drafter:
    """Return the draft of the default model that comes with labkit.

    Raises BadRequest for any other target.
    """
    path = data_path("draft.safetensors")
    if not path.is_file():
        raise BadRequest(
            f"No trained draft comes with this labkit; make one with {MAKE} and give that file."
        )
    return load_draft(path, target)


def about_shipped() -> dict:
    """Return the shipped draft's recipe, training record and acceptance."""
    return json.loads(data_path("draft.json").read_text(encoding="utf-8"))


def read_about(path: Path) -> dict:
    """Return how a draft file was made."""
    return json.loads(_metadata(path).get("about", "{}"))
