"""Save and load quantized checkpoints.

    save_quantized(model, "small", report)      # as `labkit quantize` does
    load("small")                               # needs neither the original nor a network

The folder has these files. On every machine it gives the same logits, bit for bit.

    config.json, tokenizer.json, tokenizer_config.json (with the chat template)
    model.safetensors      packed codes and scales, with a header that describes them

The header is the metadata of the safetensors file. It can be read without labkit. It gives
the version, the recipe, the method, the name and revision of the source model, the format,
shape and kernel of each packed weight, and a SHA-256 of everything that is stored. A format
determines the number of bytes, so the size is known before anything is written.

`load_weights` fills a model of the same architecture. It never reads the model's own
weights, so the model may be on the meta device.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest
from labkit.files import save_tensors
from labkit.formats import get_format
from labkit.kernels.packed_weight import PackedWeight, Plain
from labkit.kernels.registry import choose_kernel
from labkit.model.config import ModelConfig
from labkit.model.decoder import Decoder
from labkit.model.files.convert import folder_in_progress, save_description
from labkit.model.fingerprint import bytes_of
from labkit.quant.inventory import QuantizationReport, kind_of
from labkit.quant.linear import install
from labkit.quant.w8a8 import W8A8Weight

VERSION = "2"
KIND = "quantized checkpoint"
WEIGHTS = "model.safetensors"
FILES = {"config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS}
Device = str | torch.device


def save_quantized(model: Decoder, folder: str | Path, report: QuantizationReport) -> int:
    """Write a quantized model to a folder and return the size of its weights file in bytes.

    The folder appears when it is complete. Raises BadRequest if it exists and is not a
    checkpoint that labkit quantized.
    """
    folder = Path(folder).resolve()
    check_folder(folder)
    about = {
        "model": model.name or "",
        "revision": model.revision or "",
        "recipe": json.dumps(asdict(report.recipe)),
        "method": report.method,
        "source": json.dumps(model.source),
    }
    mark = {"quant_method": "labkit", "recipe": report.recipe.name, "method": report.method}
    with folder_in_progress(folder) as scratch:
        size = save_weights(model, scratch / WEIGHTS, about)
        more = {"torch_dtype": "float32", "quantization_config": mark}
        save_description(scratch, model.config, model.tokenizer, more)
    return size


def load_quantized(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
    kernels: str | None = None,
) -> Decoder:
    """Return the decoder in a folder that `save_quantized` wrote, without its tokenizer.

    Weights that are not packed (norms, biases) are converted to `dtype`. `kernels` is as in
    `load_weights`.
    """
    with torch.device("meta"):
        model = Decoder(config)
    model = model.to(dtype).eval().requires_grad_(False)
    header = load_weights(Path(folder) / WEIGHTS, model, device, kernels)
    model.name = f"{header['model']} ({Path(folder).resolve().name})"
    model.revision = header["revision"] or None
    model.source = json.loads(header["source"])
    return model


def is_quantized(folder: str | Path) -> bool:
    """Return whether `save_quantized` wrote the folder."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return config["quantization_config"]["quant_method"] == "labkit"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_folder(folder: str | Path, nbytes: int = 0) -> None:
    """Check that a checkpoint of `nbytes` bytes can be written to a folder of this name.

    Raises BadRequest if it cannot.
    """
    folder = Path(folder)
    if folder.suffix == ".safetensors":
        raise BadRequest(
            f"{folder} names a file; give the name of a folder, such as {folder.stem}."
        )
    ours = is_quantized(folder) and {path.name for path in folder.iterdir()} <= FILES
    if (folder.exists() or folder.is_symlink()) and not ours:
        raise BadRequest(
            f"{folder} exists and is not a checkpoint that labkit quantized; choose another name."
        )
    parent = next(path for path in folder.resolve().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise BadRequest(f"{parent} is not a folder that you can write to; choose another place.")
    if (free := shutil.disk_usage(parent).free) < nbytes:
        needs = f"{folder} needs {nbytes:,} B and {free:,} B are free"
        raise BadRequest(f"{needs}; choose another place.")


def save_weights(model: nn.Module, path: str | Path, about: dict[str, str] | None = None) -> int:
    """Write the weights of a quantized model to one file and return its size in bytes.

    The model may be any `nn.Module`. A weight that several layers share is stored once.
    `about` goes into the header. Raises BadRequest if no layer is quantized.
    """
    tensors: dict[str, Tensor] = {}
    formats: dict[str, dict[str, Any]] = {}
    stored: dict[int, str] = {}  # id of a weight -> the name under which it is stored
    packed: list[str] = []  # prefixes of the names that packed modules have in the state dict
    for prefix, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, PackedWeight):
            continue
        packed.append(f"{prefix}.")
        name = prefix.removesuffix("_packed")  # of the parameter that the module replaces
        kernel = "w8a8" if isinstance(module, W8A8Weight) else "auto" if module.fast else "plain"
        owner = stored.setdefault(id(module), name)
        formats[name] = {"format": module.format.name, "shape": module.shape, "kernel": kernel}
        if owner != name:
            formats[name]["shared_with"] = owner
            continue
        tensors |= {f"{name}.{part}": tensor for part, tensor in module.packed().items()}
    if not formats:
        raise BadRequest("This model has no quantized layer; quantize it first.")
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not name.startswith(tuple(packed)) and stored.setdefault(id(tensor), name) == name:
            tensors[name] = tensor.detach()
    listed = json.dumps(formats)
    header = {"labkit": KIND, "version": VERSION, **(about or {}), "formats": listed}
    return save_tensors(path, tensors, header | {"sha256": _digest(tensors, listed)})


def load_weights(
    path: str | Path, model: nn.Module, device: Device = "cpu", kernels: str | None = None
) -> dict[str, Any]:
    """Fill `model` with the weights of a file and return the file's header.

    kernels: "plain" keeps the layout of the file for every weight. None uses the kernel
        that the file names for each weight.

    Raises BadRequest if the file is damaged or was written from another architecture.
    """
    header = read_header(path)
    formats = header["formats"]
    tensors = {name: tensor.clone() for name, tensor in each_tensor(path)}
    if _digest(tensors, json.dumps(formats)) != header.get("sha256"):
        raise BadRequest(f"{path} is damaged (its checksum differs); write or fetch it again.")
    expected = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    tied = {name: first.setdefault(id(tensor), name) for name, tensor in expected.items()}
    _check_names(path, model, formats, tensors, tied)
    weights: dict[str, PackedWeight] = {}
    for name, entry in sorted(formats.items(), key=lambda item: "shared_with" in item[1]):
        if "shared_with" not in entry:
            parts = _parts(tensors, name)
            stored = {part: tensors.pop(f"{name}.{part}").to(device) for part in parts}
            format, shape = get_format(entry["format"]), tuple(entry["shape"])
            kernel: type[PackedWeight] = Plain
            if len(shape) == 2:
                how = kernels or entry["kernel"]
                w8a8 = how == "w8a8"
                kernel = W8A8Weight if w8a8 else choose_kernel(format, shape, device, how)
            weights[name] = kernel.from_packed(format, shape, stored)
        layer, _, leaf = name.rpartition(".")
        whole = leaf == "weight" and kind_of(model.get_submodule(layer))
        install(model, layer if whole else name, weights[entry.get("shared_with", name)])
    rest = {name: tensor.to(device, expected[name].dtype) for name, tensor in tensors.items()}
    model.load_state_dict(rest, strict=False, assign=True)  # names were compared above
    for name, twin in tied.items():
        if name != twin and not {name, twin} & set(formats):
            layer, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(layer), leaf, model.get_parameter(twin))
    return header


def read_header(path: str | Path) -> dict[str, Any]:
    """Return the header of a weights file, with `formats` as a dictionary.

    Raises BadRequest if the file is not a quantized checkpoint of this version.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            header = file.metadata() or {}
        if header.get("labkit") == KIND and header.get("version") == VERSION:
            return header | {"formats": json.loads(header["formats"])}
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise BadRequest(f"{path} cannot be read ({error}); write or fetch it again.") from None
    needs = f"quantized checkpoint of version {VERSION}"
    raise BadRequest(f"{path} is not a {needs}; write one with labkit quantize.")


def each_tensor(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a safetensors file.

    The file is opened again for each tensor, because an open mapping keeps its pages in
    memory. The tensors are views of the mapping.
    """
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        names = list(file.keys())
    for name in names:
        with safe_open(str(path), "pt") as file:
            tensor = file.get_tensor(name)
        yield name, tensor


def _digest(tensors: dict[str, Tensor], formats: str) -> str:
    """Return the SHA-256 of the formats and of every tensor's name, dtype, shape and bytes."""
    total = hashlib.sha256(formats.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        total.update(bytes_of(tensor))
    return total.hexdigest()


def _parts(tensors: dict[str, Tensor], name: str) -> list[str]:
    parts = ("codes", "scale", "offset", "tensor_scale")
    return [part for part in parts if f"{name}.{part}" in tensors]


def _check_names(path, model: nn.Module, formats: dict, tensors: dict, tied: dict) -> None:
    """Raise BadRequest for the first weight whose name or shape differs from the model's."""
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if kind_of(module) == "conv1d":
            expected[f"{name}.weight"].reverse()
    stored = {name: entry["shape"] for name, entry in formats.items()}
    packed = {f"{name}.{part}" for name in formats for part in _parts(tensors, name)}
    stored |= {name: list(t.shape) for name, t in tensors.items() if name not in packed}
    stored |= {
        name: stored[twin] for name, twin in tied.items() if twin in stored and name not in stored
    }
    for name in sorted({*expected, *stored}):
        if expected.get(name) != stored.get(name):
            raise BadRequest(
                f"{path} has {name} with shape {stored.get(name)}, this model with "
                f"{expected.get(name)}; the file was written from another architecture."
            )
