"""Check that a device exists, and synchronize with it."""

from __future__ import annotations

import torch

from labkit.errors import BadRequest


def check_device(device: str | torch.device) -> None:
    """Raise BadRequest for a device that this machine does not have."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        raise BadRequest(f"Device {device!r} is not known; choose cpu, cuda or mps.") from None
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(kind, True):
        raise BadRequest(f"PyTorch finds no device {device} on this machine; choose cpu.")


def synchronize(device: str | torch.device = "cpu") -> None:
    """Wait until `device` has finished its work.

    Raises BadRequest for a device other than cpu, cuda and mps.
    """
    kind = str(device).split(":")[0]
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()
    elif kind != "cpu":
        raise BadRequest(f"The device {device} cannot be timed; use cpu, cuda or mps.")
