"""Trained drafts as files: safetensors in bfloat16, with what they are and how they were made in the header.

Embedding and head are the target's and are not in the file, so a draft of the default model is 8 MB. `shipped` is the one
that comes with labkit; its recipe, training record and acceptance lie beside it (data/draft.json).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open

from labkit.assets import data_path
from labkit.assets.whole import save_tensors
from labkit.errors import BadRequest
from labkit.speculate.draft import Drafter
from labkit.speculate.hidden_net import HiddenStateNet
from labkit.speculate.hidden_state import HiddenState
from labkit.speculate.lent import Lent
from labkit.speculate.medusa import Medusa, MedusaNet

KINDS = {"hidden_state": (HiddenStateNet, HiddenState), "medusa": (MedusaNet, Medusa)}


def save_draft(net: Lent, path: Path, about: dict | None = None) -> int:
    """Write a net, whole or not at all; returns the file's bytes. `about`: how it was made, kept in the header."""
    kind = next(name for name, (made, _) in KINDS.items() if type(net) is made)
    tensors = {name: held.bfloat16() if held.dim() > 1 else held for name, held in net.state_dict().items()}
    return save_tensors(path, tensors, {"kind": kind, "about": json.dumps(about or {})})


def check_output(path: Path) -> None:
    """Refuse before hours are spent: a place that cannot be written, or a file that is no draft and so not ours to replace."""
    if path.is_dir():
        raise BadRequest(f"{path} is a folder; give the name of a file to write.")
    if path.exists() and _kind(path) not in KINDS:
        raise BadRequest(f"{path} exists and is not a draft made by `labkit distill`, so it is not replaced; choose another name.")
    there = next(folder for folder in path.resolve().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise BadRequest(f"{there} is not a folder that can be written to; choose another place for {path.name}.")


def _kind(path: Path) -> str | None:
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("kind")
    except (OSError, SafetensorError):
        return None


def load_draft(path: str | Path, target) -> Drafter:
    """The drafter in a file, for `target`. Raises BadRequest where it is none, is damaged, or was made for another model."""
    path = Path(path)
    if not path.is_file():
        raise BadRequest(f"There is no draft {str(path)!r}; give a file made by `labkit distill`.")
    try:
        with safe_open(path, "pt") as file:
            kind = (file.metadata() or {}).get("kind")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise BadRequest(f"{path.name} is not a whole safetensors file ({error}); make it again with `labkit distill`.") from None
    if kind not in KINDS or "ids" not in tensors:
        raise BadRequest(f"{path.name} holds no draft of a kind known here ({', '.join(KINDS)}); give a file made by `labkit distill`.")
    made, drafter = KINDS[kind]
    net = made(target.config, tensors["ids"])
    try:
        net.load_state_dict(tensors)
    except RuntimeError:
        raise BadRequest(f"{path.name} was trained for a model of another shape than {target.name}; use one made for it by "
                         "`labkit distill`.") from None  # fmt: skip
    return drafter(net.to(target.device).requires_grad_(False).eval(), target)


def shipped(target) -> Drafter:
    """The draft of the default model that comes with labkit. Raises BadRequest for any other target."""
    file = data_path("draft.safetensors")
    if not file.is_file():
        raise BadRequest("No trained draft comes with this labkit; make one by `labkit distill draft.safetensors` and give that file.")
    return load_draft(file, target)


def about_shipped() -> dict:
    """Its recipe, training record and acceptance."""
    return json.loads(data_path("draft.json").read_text(encoding="utf-8"))


def read_about(path: Path) -> dict:
    """How a draft file was made."""
    with safe_open(path, "pt") as file:
        return json.loads((file.metadata() or {}).get("about", "{}"))
