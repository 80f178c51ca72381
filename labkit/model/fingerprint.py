"""A digest of a model: its numbers, adapters, formats and configuration.

Two models with one fingerprint give a token the same keys and values, so the cache of one
may serve the other. Any changed weight, adapter, format or RoPE setting changes it. The
tokenizer is not part of it: tokens are compared.
Cost: every byte of the weights is hashed (about a second per GB); compute it once per model,
and again after changing the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass

import torch
from torch import Tensor, nn

from labkit.cache.prefix.entry import Fingerprint
from labkit.model.decoder import Decoder


def fingerprint(model: Decoder, adapters: Sequence[str] = ()) -> Fingerprint:
    """Return the fingerprint; `adapters`: names and versions (or digests) of adapters, in order."""
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
    """Return parameters, buffers and plain attributes, which may contain packed codes."""
    inside = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    return (
        inside
        | dict(module.named_parameters(recurse=False))
        | dict(module.named_buffers(recurse=False))
    )


def _tensors(path: str, value) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(f"{path}.{field.name}", getattr(value, field.name))


def _bytes(tensor: Tensor) -> memoryview:
    plain = tensor.detach().to("cpu").contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")
