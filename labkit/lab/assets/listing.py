"""What can be pulled, as data: data/assets.json read into dataclasses.

An asset is a few files inside wheels of a Python package index. Nothing here touches the
network. Sizes are bytes; every wheel and every large file has its SHA-256.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

from labkit.errors import BadRequest
from labkit.files import data_path


@dataclass(frozen=True)
class Wheel:
    package: str
    version: str
    file: str  # the name of the wheel file
    size: int
    sha256: str


@dataclass(frozen=True)
class File:
    """A file to extract; `parts` are (wheel file, member) and are joined in order."""

    name: str
    size: int
    sha256: str
    parts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Tree:
    """Many small files: the members of a wheel that match `pattern`, relative to `below`."""

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
    derived_size: int = 0  # bytes of what labkit builds from it later, such as safetensors

    @property
    def revision(self) -> str:
        """The first package with its version; it identifies the bytes of the asset."""
        return f"{self.wheels[0].package}=={self.wheels[0].version}"

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.wheels[0].version}"

    @property
    def download_size(self) -> int:
        return sum(wheel.size for wheel in self.wheels)

    @property
    def disk_need(self) -> int:
        """Peak bytes of a pull: the wheels, the extracted files and what is built from them."""
        return self.download_size + sum(file.size for file in self.files) + self.derived_size


def parse(name: str, entry: dict) -> Asset:
    """Return one entry of assets.json as an Asset."""
    wheels = tuple(Wheel(**wheel) for wheel in entry["wheels"])
    files = tuple(
        File(**file | {"parts": tuple((part["wheel"], part["member"]) for part in file["parts"])})
        for file in entry["files"]
    )
    trees = tuple(Tree(**tree) for tree in entry.get("trees", ()))
    lists = {"wheels": wheels, "files": files, "trees": trees}
    return Asset(name=name, **entry | lists | {"aliases": tuple(entry.get("aliases", ()))})


@cache
def registry() -> dict[str, Asset]:
    """Return every asset by its name."""
    entries = json.loads(data_path("assets.json").read_text(encoding="utf-8"))
    return {name: parse(name, entry) for name, entry in entries.items()}


def find(name: str | Asset) -> Asset:
    """Return the asset of that name or alias."""
    if isinstance(name, Asset):
        return name
    for asset in registry().values():
        if name == asset.name or name in asset.aliases:
            return asset
    known = ", ".join(sorted(registry()))
    raise BadRequest(f"There is no asset {name!r}; choose from {known} or 'default'.")
