"""The header of a quantised checkpoint: what it must say, and whether the bytes agree.

JSON in the safetensors metadata: version, for every layer its kind, format, shape, kernel, dtype, bias and whom it shares
its bytes with, the total of tensor bytes and a SHA-256 over all of them. A file is believed only where all of it agrees.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from labkit.errors import BadRequest
from labkit.formats import get_format
from labkit.formats.integer import DTYPES
from labkit.formats.tensor import finite

VERSION = 1
# What each field of a layer may be; the format's name is checked by the formats themselves.
FIELDS = {
    "kind": lambda value: value in ("linear", "embedding", "experts"),
    "format": lambda value: isinstance(value, str),
    "shape": lambda value: isinstance(value, list) and len(value) > 1 and all(type(n) is int and n > 0 for n in value),
    "kernel": lambda value: value in ("auto", "plain", "w8a8"),
    "dtype": lambda value: value in ("float32", "bfloat16", "float16", "float64"),
    "bias": lambda value: isinstance(value, bool),
    "scale": lambda value: type(value) in (int, float) and math.isfinite(value),
    "shared_with": lambda value: value is None or isinstance(value, str),
}


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else b"")
    return total.hexdigest()


def read_header(path: str | Path) -> dict:
    """The header alone, checked for version and fields."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise BadRequest(
            f"{path} cannot be read as safetensors ({error}); the file is broken, truncated or something else."
        ) from None
    if metadata.get("labkit") != "quantised checkpoint":
        raise BadRequest(f"{path} is not a quantised checkpoint of labkit; write one with labkit quantize.")
    missing = [key for key in ("version", "layers", "tensor_bytes", "sha256", "about") if key not in metadata]
    if missing:
        raise BadRequest(
            f"The header of {path} lacks {missing[0]!r}; the file is damaged or was written by something else."
        )
    header = {
        key: metadata[key] if key in ("labkit", "sha256") else _json(metadata[key], key, path) for key in metadata
    }
    if type(header["version"]) is not int or header["version"] != VERSION:
        raise BadRequest(
            f"{path} has version {header['version']} and this labkit reads version {VERSION}; write it again or use the labkit that wrote it."
        )
    if not isinstance(header["layers"], dict):
        raise BadRequest(f"The header of {path} lists no layers by name; the file is damaged.")
    for name, layer in header["layers"].items():
        check_layer(name, layer, path)
    return header


def check_layer(name: str, layer: object, path) -> None:
    """Refuse a layer whose fields are missing, or are what no layer's are."""
    layer = layer if isinstance(layer, dict) else {}
    if layer.get("kind") == "alias" and isinstance(layer.get("shared_with"), str) and layer["shared_with"] != name:
        return
    for field, may_be in FIELDS.items():
        if field not in layer:
            raise BadRequest(f"The header of {path} says nothing of {field!r} for {name}; the file is damaged.")
        if not may_be(layer[field]):
            raise BadRequest(f"The header of {path} says {field} {layer[field]!r} of {name}, which cannot be; the file lies about itself.")
    get_format(layer["format"])


def _json(text: str, key: str, path) -> object:
    try:
        return json.loads(text)
    except ValueError:
        raise BadRequest(f"The header field {key!r} of {path} is not JSON; the file is damaged.") from None


def stored_shapes(format, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The tensors that a weight [..., K] of this format is stored as: rows first, codes and zero points packed to bytes."""
    rows, length = math.prod(shape[:-1]), shape[-1]
    lines, groups = (1, 1) if format.sharing == "tensor" else (rows, format.groups(length))
    found = {"codes": (rows, length if format.kind == "float" else math.ceil(length * format.bits / 8))}
    if format.scale_dtype:
        found["scale"] = (lines, groups)
    if format.offset:
        found["offset"] = (lines, math.ceil(groups * format.bits / 8) if format.offset == "zero_point" else groups)
    return found | ({"tensor_scale": ()} if format.tensor_scale else {})


def check_stored(name: str, format, shape: tuple[int, ...], stored: dict[str, Tensor], path) -> None:
    """Refuse stored tensors whose dtypes or shapes are not what the header says of them, or whose numbers are none."""
    scale = DTYPES.get(format.scale_dtype)
    dtypes = {
        "codes": DTYPES[format.name] if format.kind == "float" else torch.uint8, "scale": scale,
        "offset": torch.uint8 if format.offset == "zero_point" else scale, "tensor_scale": torch.float32,
    }  # fmt: skip
    shapes = stored_shapes(format, shape)
    if {key: tuple(t.shape) for key, t in stored.items()} != shapes or any(stored[key].dtype != dtypes[key] for key in shapes):
        raise BadRequest(
            f"The header of {path} says that {name} is {format.name} {list(shape)}, but the bytes stored are not; the file lies about itself."
        )
    check_numbers(name, stored.values(), path)


def check_numbers(name: str, tensors: Iterable[Tensor], path) -> None:
    """Refuse NaN and infinity."""
    if not all(finite(t if t.itemsize > 1 else t.float()) for t in tensors if t.is_floating_point()):
        raise BadRequest(f"{path} holds NaN or infinity for {name}; get the file again, or write it again.")


def check_output(path: str | Path, nbytes: int = 0) -> None:
    """Refuse before hours are spent: a place that cannot be written, or a file that is not ours to replace."""
    path = Path(path)
    if path.is_dir():
        raise BadRequest(f"{path} is a folder; give the name of a file to write.")
    if path.exists():
        try:
            read_header(path)
        except BadRequest:
            raise BadRequest(
                f"{path} exists and is not a quantised checkpoint of labkit, so it is not replaced; choose another name."
            ) from None
    there = next(folder for folder in path.resolve().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise BadRequest(f"{there} is not a folder that can be written to; choose another place for {path.name}.")
    if (free := shutil.disk_usage(there).free) < nbytes:
        raise BadRequest(f"{path} will take {nbytes:,} B and {there} has {free:,} B left; choose another place.")
