"""Prefixes on disk: one private safetensors file each, checked whenever it is read.

The folder has mode 0700, files 0600, and both belong to the current user. A symbolic
link, or a file that this class did not write, raises UntrustedFile. A file's name is
the SHA-256 of its content, which includes a random number. So the name says nothing
about the content, and a changed file no longer matches its name.

A file's header records its tenant, scope, model, tokens, documents and age, and how a
token is stored (`layout`). After reading, the header must match the store's own list,
and every tensor must have the pool's shape and dtype. Deleting a file unlinks it. If
that is not enough, encrypt the file system.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from labkit.cache.paged.cache import PagedCache
from labkit.cache.paged.pool import PagePool
from labkit.cache.prefix.entry import Entry, Identity
from labkit.errors import BadRequest

NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
UNFINISHED = re.compile(r"\.writing-[0-9a-f]{32}")
KEY = "labkit_prefix"


class UntrustedFile(BadRequest):
    """A file or folder was changed, or was not written by `DiskTier`."""


class DiskTier:
    """A folder of prefixes, of up to `budget_bytes` (None: no limit).

    The store decides which files are deleted. Raises UntrustedFile if the folder is a
    link, or if other users can access it.
    """

    def __init__(self, folder: str | os.PathLike[str], budget_bytes: int | None = None):
        self.folder, self.budget_bytes = Path(folder), budget_bytes
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(self.folder)
        if stat.S_ISLNK(status.st_mode):
            raise UntrustedFile("The folder for prefixes is a symbolic link; give its target.")
        _check_private(status, "The folder for prefixes", "chmod 700")
        self._sizes: dict[str, int] = {}

    def entries(self) -> Iterator[Entry]:
        """Yield the entries that an earlier process left.

        Raises UntrustedFile for the first file that is not valid.
        """
        for path in sorted(self.folder.iterdir()):
            if UNFINISHED.fullmatch(path.name) and not path.is_symlink():
                path.unlink()  # the process ended while it wrote this file
                continue
            entry, data = self.read(path.name)
            self._sizes[path.name] = len(data)
            yield entry

    def write(self, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        """Write a file and return its name."""
        metadata = {KEY: json.dumps(about), "random": secrets.token_hex(16)}
        data = safetensors.torch.save(dict(tensors), metadata)
        name = f"{hashlib.sha256(data).hexdigest()}.safetensors"
        aside = self.folder / f".writing-{secrets.token_hex(16)}"
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, self.folder / name)
        finally:
            aside.unlink(missing_ok=True)
        self._sizes[name] = len(data)
        return name

    def read(self, name: str) -> tuple[Entry, bytes]:
        """Return the entry in a file's header, and the content of the file.

        Raises UntrustedFile if it is not plain, private and unchanged.
        """
        if not NAME.fullmatch(name):
            raise UntrustedFile(f"The file {name[:80]!r} is not from labkit; move it elsewhere.")
        this = f"The prefix {name[:8]}..."
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            with open(os.open(self.folder / name, flags), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise UntrustedFile(f"{this} is not a plain file; delete it.")
                _check_private(status, this, "chmod 600")
                data = file.read()
        except OSError as error:
            raise UntrustedFile(f"{this} cannot be read ({error.strerror}); delete it.") from None
        if not name.startswith(hashlib.sha256(data).hexdigest()):
            raise UntrustedFile(f"{this} is damaged or was changed; delete it.")
        try:
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            about = json.loads(header["__metadata__"][KEY])
            identity, tokens = Identity.from_json(about["identity"]), tuple(about["tokens"])
            return Entry(**about | {"identity": identity, "tokens": tokens}, file=name), data
        except (ValueError, KeyError, TypeError):
            raise UntrustedFile(f"{this} has no valid header; delete it.") from None

    def delete(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)
        self._sizes.pop(name, None)

    def nbytes(self) -> int:
        return sum(self._sizes.values())

    def __repr__(self) -> str:
        return f"DiskTier({len(self._sizes)} files, {self.nbytes()} bytes)"


def _check_private(status: os.stat_result, what: str, fix: str) -> None:
    if os.name == "posix" and (status.st_uid != os.geteuid() or status.st_mode & 0o077):
        raise UntrustedFile(
            f"{what} belongs to another user or is open to others; run {fix} as its owner."
        )


def named_tensors(pool: PagePool) -> dict[str, Tensor]:
    """Return the pool's tensors by the names that they have in a file."""
    return {
        f"{layer}.{side}.{name}": tensor
        for layer, sides in pool.layers.items()
        for side, tensors in enumerate(sides)
        for name, tensor in tensors.items()
    }


def layout(pool: PagePool) -> str:
    """Describe how the pool stores a token; equal texts mean equal bytes."""
    tensors = [[n, list(t.shape[1:]), str(t.dtype)] for n, t in named_tensors(pool).items()]
    return json.dumps([pool.name, pool.size, tensors])


def about(entry: Entry) -> dict[str, Any]:
    """Return the header that a file stores for its entry."""
    plain = {name: getattr(entry, name) for name in ("documents", "created", "expires", "layout")}
    return plain | {"identity": entry.identity.to_json(), "tokens": list(entry.tokens)}


def tensors_of(entry: Entry) -> dict[str, Tensor]:
    """Return copies of the entry's blocks, in order."""
    table, tensors = entry.pages.tables[0], named_tensors(entry.pages.pool)
    return {name: t[table] for name, t in tensors.items()}


def load(disk: DiskTier, entry: Entry, pool: PagePool) -> PagedCache:
    """Read the entry's pages into the pool.

    Raises PoolFull if they do not fit, or UntrustedFile if anything has changed.
    """
    on_disk, data = disk.read(entry.file)
    tensors = safetensors.torch.load(data)
    places, blocks = named_tensors(pool), len(entry.tokens) // pool.size
    shapes = {name: (t.dtype, t.shape) for name, t in tensors.items()}
    expected = {name: (t.dtype, (blocks, *t.shape[1:])) for name, t in places.items()}
    if about(on_disk) != about(entry) or shapes != expected:
        raise UntrustedFile(f"The prefix {entry.file[:8]}... does not match this store; delete it.")
    pages = PagedCache.over(pool)
    pages.tables[0] += pool.allocate(blocks)
    pages.lengths = (blocks * pool.size,)
    with torch.no_grad():
        for name, tensor in tensors.items():
            places[name][pages.tables[0]] = tensor.to(pool.device)
    return pages
