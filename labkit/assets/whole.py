"""Tensor files that are whole or not there: written aside, brought to the disk, then renamed.

Each process writes aside under a name of its own, so two that make the same file do not write into each other's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from labkit.assets.wheels import flush


def save_tensors(path: str | Path, tensors: Mapping, about: Mapping[str, str] | None = None) -> int:
    """A safetensors file, `about` in its header; what `path` named before stays until then. Returns the file's bytes."""
    from safetensors import SafetensorError  # here: these load torch
    from safetensors.torch import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, aside, dict(about or {}))
        readable(aside)
        flush(aside)
        os.replace(aside, path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from None
    finally:
        aside.unlink(missing_ok=True)
    return path.stat().st_size


def readable(path: Path) -> None:
    """For whom any new file is: safetensors writes for its owner alone."""
    mask = os.umask(0)  # it can only be read by setting it
    os.umask(mask)
    path.chmod(0o666 & ~mask)
