"""What a model is, as far as keys and values go: a digest of its numbers, its adapters, formats and configuration.

Two models with one fingerprint give one token the same keys and values, so what was computed by one may serve the other;
any changed weight, adapter, format or RoPE setting gives another one. The tokenizer is no part: tokens are compared.
Cost: every byte of the weights is hashed once (about a second a GB); ask once for a model, and again after changing it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass

import torch
from torch import Tensor, nn

from labkit.cache.prefix_identity import Fingerprint


def fingerprint(model: nn.Module, adapters: Sequence[str] = ()) -> Fingerprint:
    """`adapters`: names and versions (or digests) of whatever is applied beside the weights, in order."""
    weights, formats = hashlib.sha256(), {}
    for name, module in model.named_modules():
        formats[name] = type(module).__qualname__
        for key, value in sorted(_held(module).items()):
            for path, tensor in _tensors(f"{name}.{key}", value):
                weights.update(f"{path}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
                weights.update(_bytes(tensor))
                formats[path] = str(tensor.dtype)
    settings = json.dumps(asdict(model.config), sort_keys=True, default=str)
    described = hashlib.sha256(json.dumps(formats, sort_keys=True).encode()).hexdigest()
    return Fingerprint(weights.hexdigest(), tuple(adapters), described, settings)


def _held(module: nn.Module) -> dict:
    """Parameters, buffers and whatever else a module holds numbers in (packed codes in a plain attribute)."""
    inside = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    return inside | dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))


def _tensors(path: str, value) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(f"{path}.{field.name}", getattr(value, field.name))


def _bytes(tensor: Tensor) -> memoryview:
    plain = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview((plain.view(torch.uint8) if plain.numel() else plain.to(torch.uint8)).numpy())
