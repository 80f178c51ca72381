"""Quantised checkpoints: one safetensors file and a readable header; the same logits, bit for bit, in a new process.

The header (JSON in the file's metadata) says for every layer what its bytes are: kind, format, shape, kernel. Codes are
stored packed, so a file is as small as the formats promise: the size is known before anything is written.
`load` puts the layers into a skeleton: a model of the same architecture, on the meta device if you like, whose weights
are never read. A file that lies about itself (sizes, dtypes, missing or surplus tensors, contents) is refused.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from labkit.assets.whole import readable
from labkit.errors import BadRequest
from labkit.formats import get_format
from labkit.formats.tensor import QuantizedTensor
from labkit.kernels.packed import PackedWeight, pack_weight
from labkit.quant.contents import contents
from labkit.quant.header import VERSION, check_numbers, check_output, check_stored, digest, read_header
from labkit.quant.linear import QuantizedEmbedding, QuantizedLinear
from labkit.quant.w8a8 import W8A8Weight
from labkit.quant.walk import QuantizationReport, hold_parameter


def predict_file_bytes(report: QuantizationReport) -> int:
    """Bytes of tensors that `save` will write for a model with this report, before it is quantised; the header adds ~200 B a layer."""
    return report.nbytes


def save(model: nn.Module, path: str | Path, *, about: dict | None = None) -> int:
    """Write the model and return the bytes written. `about`: what a reader needs to build the skeleton (JSON).

    The file appears under its name when it is complete; a killed run leaves what the next one overwrites."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    check_output(path)
    tensors, layers = contents(model)
    if not any(layer["kind"] != "alias" for layer in layers.values()):
        raise BadRequest("This model has no quantised layer; quantise it first, or save it with safetensors as it is.")
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    header = {
        "labkit": "quantised checkpoint", "version": VERSION, "about": about or {}, "layers": layers,
        "tensor_bytes": size, "sha256": digest(tensors),
    }  # fmt: skip
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in header.items()}
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, part, metadata)
        readable(part)
        part.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from None
    finally:
        part.unlink(missing_ok=True)
    return path.stat().st_size


def warn_if_larger(report: QuantizationReport) -> None:
    """Say before writing when the quantised file will be larger than the original: a tied head stored a second time."""
    if predict_file_bytes(report) > report.original_nbytes:
        warnings.warn(
            f"The quantised file will take {predict_file_bytes(report):,} B and the original {report.original_nbytes:,} B; "
            "give head and embedding one format, so that they stay shared.",
            stacklevel=2,
        )


def load(path: str | Path, skeleton: nn.Module, kernel: str | None = None) -> nn.Module:
    """Fill a model of the same architecture (its weights are ignored; the meta device is fine) and return it.

    `kernel`: "plain" holds every weight as it lies in the file; None in the form that the file names."""
    from safetensors.torch import load_file

    header = read_header(path)
    tensors = load_file(str(path))  # slices of one mapped file: what is kept is copied, or all its pages would stay resident
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if size != header["tensor_bytes"] or digest(tensors) != header["sha256"]:
        raise BadRequest(
            f"The contents of {path} are not what its header was written for (size or checksum differ); get the file again."
        )
    taken: set[str] = set()
    shared: dict[str, PackedWeight] = {}
    ordered = sorted(header["layers"].items(), key=lambda item: item[1]["shared_with"] is not None)
    for name, layer in ordered:
        if layer["kind"] == "alias":
            continue
        _install(skeleton, name, layer if kernel is None else layer | {"kernel": kernel}, tensors, taken, shared, path)
    for name, tensor in tensors.items():
        if name not in taken:
            _assign(skeleton, name, tensor.clone(), path)
            taken.add(name)
    for name, layer in ordered:
        if layer["kind"] == "alias":
            _assign(skeleton, name, _find(skeleton, layer["shared_with"], path), path)
            taken.add(name)
    inside = tuple(f"{name}.weight." for name in header["layers"]) + tuple(f"{name}_packed." for name in header["layers"])
    empty = [n for n in skeleton.state_dict() if n not in taken and not n.startswith(inside)]
    empty += [n for n, t in [*skeleton.named_parameters(), *skeleton.named_buffers()] if t.device.type == "meta"]
    if empty:
        raise BadRequest(f"{path} holds nothing for {empty[0]} of this model; it was written from another architecture.")
    return skeleton


def _install(skeleton, name: str, layer: dict, tensors, taken: set, shared: dict, path) -> None:
    format, shape = get_format(layer["format"]), tuple(layer["shape"])
    owner = layer["shared_with"]
    if owner is None:
        stored = {
            key: tensors[f"{name}.weight.{key}"].clone()
            for key in ("codes", "scale", "offset", "tensor_scale")
            if f"{name}.weight.{key}" in tensors
        }
        check_stored(name, format, shape, stored, path)
        taken.update(f"{name}.weight.{key}" for key in stored)
        held = QuantizedTensor(format, shape, **stored)
        if layer["kind"] == "experts":
            parent, _, leaf = name.rpartition(".")
            if _find(skeleton, name, path).shape != shape:
                raise BadRequest(f"{path} holds {name} as {list(shape)}, which does not fit this model; it was written from another architecture.")
            hold_parameter(_module(skeleton, parent, path), leaf, held)
            return
        shared[name] = W8A8Weight(held) if layer["kernel"] == "w8a8" else pack_weight(held, layer["kernel"])
    elif owner not in shared:
        raise BadRequest(f"The header of {path} shares {name} with {owner}, which is not in the file.")
    old = _module(skeleton, name, path)
    weight = getattr(old, "weight", None)
    expected = (
        tuple(weight.shape[::-1] if type(old).__name__ == "Conv1D" else weight.shape)
        if isinstance(weight, Tensor)
        else None
    )
    if expected is not None and expected != shape:
        raise BadRequest(
            f"{path} holds {name} as {list(shape)} and this model has {list(expected)}; it was written from another architecture."
        )
    if isinstance(old, nn.Embedding | QuantizedEmbedding) != (layer["kind"] == "embedding"):
        raise BadRequest(f"{path} holds {name} as {layer['kind']}, and this model does not; it was written from another architecture.")
    if layer["bias"] != (getattr(old, "bias", None) is not None):
        raise BadRequest(f"{path} and this model do not agree on a bias of {name}; it was written from another architecture.")
    packed = shared[owner or name]
    if layer["kind"] == "embedding":
        new = QuantizedEmbedding(packed, getattr(torch, layer["dtype"]), scale=layer["scale"])
    else:
        bias = tensors.get(f"{name}.bias") if layer["bias"] else None
        if layer["bias"] and bias is None:
            raise BadRequest(f"The header of {path} promises a bias of {name} that is not in the file.")
        new = QuantizedLinear(packed, None if bias is None else bias.clone())
        taken.update([f"{name}.bias"] if layer["bias"] else [])
    parent, _, leaf = name.rpartition(".")
    setattr(_module(skeleton, parent, path), leaf, new.train(False))


def _module(skeleton: nn.Module, name: str, path) -> nn.Module:
    try:
        return skeleton.get_submodule(name)
    except AttributeError:
        raise BadRequest(
            f"{path} holds {name}, which this model does not have; it was written from another architecture."
        ) from None


def _find(skeleton: nn.Module, name: str, path) -> Tensor:
    parent, _, leaf = name.rpartition(".")
    found = getattr(_module(skeleton, parent, path), leaf, None)
    if not isinstance(found, Tensor):
        raise BadRequest(f"The header of {path} names {name}, which is no tensor of this model; the file lies about itself.")
    return found


def _assign(skeleton: nn.Module, name: str, tensor: Tensor, path) -> None:
    parent, _, leaf = name.rpartition(".")
    module = _module(skeleton, parent, path)
    current = getattr(module, leaf, None)
    same = isinstance(current, Tensor) and current.shape == tensor.shape
    if not same or current.is_floating_point() != tensor.is_floating_point():
        raise BadRequest(
            f"{path} holds {name} as {list(tensor.shape)} {tensor.dtype}, which does not fit this model; it was written from another architecture."
        )
    check_numbers(name, [tensor], path)
    if leaf in module._parameters:
        module._parameters[leaf] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[leaf] = tensor
