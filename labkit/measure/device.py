"""Whether a device exists on this machine, asked before anything is read or allocated on it."""

from __future__ import annotations

import torch

from labkit.errors import BadRequest


def check_device(device: str | torch.device) -> None:
    """Refuse a device that does not exist here."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        raise BadRequest(f"There is no device {device!r}: choose cpu, cuda or mps.") from None
    here = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}.get(kind, lambda: True)
    if not here():
        raise BadRequest(f"The device {device} was asked for and PyTorch finds none on this machine: choose cpu.")
