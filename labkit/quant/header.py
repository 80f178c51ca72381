"""The header of a quantised checkpoint: what it must say, and whether the bytes agree.

JSON in the safetensors metadata: version, for every layer its kind, format, shape, kernel, dtype, bias and whom it shares
its bytes with, the total of tensor bytes and a SHA-256 over all of them. A file is believed only where all of it agrees.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from labkit.errors import BadRequest
from labkit.formats import get_format
from labkit.formats.integer import DTYPES

VERSION = 1
FIELDS = {"kind", "format", "shape", "kernel", "dtype", "bias", "scale", "shared_with"}


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
    if header["version"] != VERSION:
        raise BadRequest(
            f"{path} has version {header['version']} and this labkit reads version {VERSION}; write it again or use the labkit that wrote it."
        )
    for name, layer in header["layers"].items():
        if layer.get("kind") == "alias" and "shared_with" in layer:
            continue
        if lacking := FIELDS - set(layer):
            raise BadRequest(
                f"The header of {path} says nothing of {sorted(lacking)[0]!r} for {name}; the file is damaged."
            )
        get_format(layer["format"])
    return header


def _json(text: str, key: str, path) -> object:
    try:
        return json.loads(text)
    except ValueError:
        raise BadRequest(f"The header field {key!r} of {path} is not JSON; the file is damaged.") from None


def check_stored(name: str, format, shape: tuple[int, ...], stored: dict[str, Tensor], path) -> None:
    """Refuse stored tensors whose dtypes or bytes are not what the header says of them."""
    bytes_there = sum(t.numel() * t.element_size() for t in stored.values())
    codes = stored.get("codes")
    wanted = DTYPES[format.name] if format.kind == "float" else torch.uint8
    scale = stored.get("scale")
    scale_dtype = DTYPES.get(format.scale_dtype) if format.scale_dtype else None
    if (
        codes is None
        or codes.dtype != wanted
        or bytes_there != format.nbytes(shape)
        or (scale_dtype is None) != (scale is None)
        or (scale is not None and scale.dtype != scale_dtype)
        or (format.offset is None) != ("offset" not in stored)
    ):
        raise BadRequest(
            f"The header of {path} says that {name} is {format.name} {list(shape)}, but the bytes stored are not; the file lies about itself."
        )


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
