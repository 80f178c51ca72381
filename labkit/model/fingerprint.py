"""Compute a fingerprint of a model: a digest of weights, adapters, formats and configuration.

Models with the same fingerprint compute the same keys and values, so one can use the cache
of another. A change of a weight, an adapter, a format or a RoPE setting changes the
fingerprint. The tokenizer is not part of it, because caches compare token ids.

Cost: every byte of the weights is hashed, about 1 s per GB. Compute the fingerprint once per
model, and again after a change of the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass

import torch
from torch import Tensor

from labkit.cache.prefix.entry import Fingerprint
from labkit.model.decoder import Decoder


def fingerprint(model: Decoder, adapters: Sequence[str] = ()) -> Fingerprint:
    """Return the fingerprint of a model.

    `adapters` are the names and versions (or digests) of its adapters, in order.
    """
    weights, formats = hashlib.sha256(), {}
    for name, module in model.named_modules():
        formats[name] = type(module).__qualname__
        # Plain attributes may contain packed codes.
        values = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        values |= dict(module.named_parameters(recurse=False))
        values |= dict(module.named_buffers(recurse=False))
        for key, value in sorted(values.items()):
            for path, tensor in _tensors(f"{name}.{key}", value):
                weights.update(f"{path}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
                weights.update(bytes_of(tensor))
                formats[path] = str(tensor.dtype)
    settings = json.dumps(asdict(model.config), sort_keys=True, default=str)
    described = hashlib.sha256(json.dumps(formats, sort_keys=True).encode()).hexdigest()
    return Fingerprint(weights.hexdigest(), tuple(adapters), described, settings)


def _tensors(path: str, value) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor, or the tensors in the fields of a dataclass, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(f"{path}.{field.name}", getattr(value, field.name))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's numbers, in the order of its rows."""
    plain = tensor.detach().to("cpu").contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")
