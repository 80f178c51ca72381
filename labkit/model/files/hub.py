"""Checkpoints from the hub, by id and revision; the size is shown before the download.

A revision is pinned: without one, the current commit is looked up once and returned, and a
result can name it. Only configuration, tokenizer and safetensors are fetched; never pickles,
never code.
"""

from __future__ import annotations

from pathlib import Path

from labkit.errors import BadRequest

_WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def fetch(name: str, revision: str | None = None) -> tuple[Path, str]:
    """Return the local folder of a hub checkpoint and its commit. Raises BadRequest."""
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.utils import LocalEntryNotFoundError
    except ImportError as missing:
        raise BadRequest(
            f"{name} is a hub id and huggingface_hub is not installed: pip install huggingface_hub."
        ) from missing
    patterns = [*_WANTED, "*.safetensors", "model.safetensors.index.json"]
    try:  # what was fetched before needs no network
        folder = Path(
            snapshot_download(
                name, revision=revision, allow_patterns=patterns, local_files_only=True
            )
        )
        if any(folder.glob("*.safetensors")):
            return folder, folder.name
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass
    try:
        from labkit.files import say, size

        info = HfApi().model_info(name, revision=revision, files_metadata=True)
        total = 0
        for file in info.siblings or ():
            if file.rfilename in _WANTED or file.rfilename.endswith(".safetensors"):
                total += file.size or 0
        licence = getattr(info.card_data, "license", None) or "not stated"
        say(f"{name} at {info.sha}: {size(total)} to fetch from the hub, licence {licence}.")
        folder = Path(snapshot_download(name, revision=info.sha, allow_patterns=patterns))
        return folder, str(info.sha)
    except (
        Exception
    ) as reason:  # httpx, the hub's own and the system's: all mean the same to the reader
        raise BadRequest(
            f"{name} could not be fetched from the hub ({type(reason).__name__}): check the id, the revision "
            "and the network, or give a folder that holds the checkpoint."
        ) from reason
