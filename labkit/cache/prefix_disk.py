"""Prefixes on disk: one safetensors file each, private, whole or not there, and checked again when it is read.

    folder 0700, files 0600, of this user; a symbolic link, or anything that was not written here, is refused
    the name is the SHA-256 of the whole file, which holds a random number: it says nothing about the content,
    and a changed or cut file no longer matches it

Deleting unlinks the file; what the disk itself keeps of unlinked files is the file system's business (encrypt it).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import safetensors.torch
from torch import Tensor

from labkit.errors import BadRequest

NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
UNFINISHED = re.compile(r"\.writing-[0-9a-f]{32}")
KEY = "labkit_prefix"


class Refused(BadRequest):
    """A file or folder that this tier did not write, or that is no longer as it was written."""


class DiskTier:
    """`budget_bytes` None: as much as the disk holds. The store that uses it decides what is deleted."""

    def __init__(self, folder: str | os.PathLike, budget_bytes: int | None = None):
        self.folder, self.budget_bytes = Path(folder), budget_bytes
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(self.folder)
        if stat.S_ISLNK(found.st_mode):
            raise Refused("The folder for prefixes is a symbolic link; give the folder itself.")
        self._check_private(found, "The folder for prefixes", "chmod 700")
        self._sizes: dict[str, int] = {}

    def scan(self) -> Iterator[tuple[str, dict]]:
        """(name, what was written beside the tensors) of every file; refuses the first that was not written here."""
        for path in sorted(self.folder.iterdir()):
            if UNFINISHED.fullmatch(path.name) and not path.is_symlink():
                path.unlink()  # a process was ended while it wrote
                continue
            header = self._header(path.name, self._bytes(path.name))
            self._sizes[path.name] = path.stat().st_size
            yield path.name, header

    def write(self, about: Mapping, tensors: Mapping[str, Tensor]) -> str:
        """The name of the new file."""
        about = dict(about) | {"random": secrets.token_hex(16)}
        data = safetensors.torch.save(dict(tensors), {KEY: json.dumps(about)})
        name, unfinished = f"{hashlib.sha256(data).hexdigest()}.safetensors", f".writing-{secrets.token_hex(16)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        try:
            with open(os.open(self.folder / unfinished, flags, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(self.folder / unfinished, self.folder / name)
        except BaseException:
            with suppress(OSError):
                (self.folder / unfinished).unlink()
            raise
        self._sizes[name] = len(data)
        return name

    def read(self, name: str) -> tuple[dict, dict[str, Tensor]]:
        """What was written, or `Refused`."""
        data = self._bytes(name)
        if f"{hashlib.sha256(data).hexdigest()}.safetensors" != name:
            raise Refused(f"The prefix {name[:8]}... is damaged or was changed; it is not used.")
        return self._header(name, data), safetensors.torch.load(data)

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            (self.folder / name).unlink()
        self._sizes.pop(name, None)

    def nbytes(self) -> int:
        return sum(self._sizes.values())

    def _bytes(self, name: str) -> bytes:
        if not NAME.fullmatch(name):
            raise Refused(f"The folder for prefixes holds {name[:80]!r}, which was not written here; move it elsewhere.")
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            with open(os.open(self.folder / name, flags), "rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise Refused(f"The prefix {name[:8]}... is not a plain file; delete it.")
                self._check_private(found, f"The prefix {name[:8]}...", "chmod 600")
                return file.read()
        except OSError as error:
            link = (self.folder / name).is_symlink()
            what = "is a symbolic link; delete it" if link else f"cannot be read ({error.strerror})"
            raise Refused(f"The prefix {name[:8]}... {what}.") from None

    @staticmethod
    def _header(name: str, data: bytes) -> dict:
        try:
            size = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + size])
            about = json.loads(header["__metadata__"][KEY])
            end = max((tensor["data_offsets"][1] for key, tensor in header.items() if key != "__metadata__"), default=0)
            if len(data) != 8 + size + end:
                raise ValueError
            return about
        except (ValueError, KeyError, TypeError, IndexError):
            raise Refused(f"The prefix {name[:8]}... is cut short or was not written here; delete it.") from None

    @staticmethod
    def _check_private(found: os.stat_result, what: str, fix: str) -> None:
        if os.name == "posix" and (found.st_uid != os.geteuid() or found.st_mode & 0o077):
            raise Refused(f"{what} belongs to or is open to others; {fix} it as its owner, or give another.")

    def __repr__(self) -> str:
        return f"DiskTier({len(self._sizes)} files, {self.nbytes()} bytes)"
