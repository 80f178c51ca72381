"""Checkpoints from the hub: by id and revision, the size shown before anything is fetched.

A revision is pinned: what was not given is looked up once and reported as the commit it stands for, so that a result
can name it. Only configuration, tokenizer and safetensors are fetched; never pickles, never code.
"""

from __future__ import annotations

from pathlib import Path

from labkit.errors import BadRequest

_WANTED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def fetch(name: str, revision: str | None = None) -> tuple[Path, str]:
    """The local folder of a hub checkpoint and the commit it is of."""
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.utils import LocalEntryNotFoundError
    except ImportError as missing:
        raise BadRequest(
            f"{name} is a hub id and huggingface_hub is not installed: pip install huggingface_hub."
        ) from missing
    patterns = [*_WANTED, "*.safetensors", "model.safetensors.index.json"]
    try:  # what was fetched before needs no network
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=True))
        if any(folder.glob("*.safetensors")):
            return folder, folder.name
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass
    try:
        from labkit.assets.progress import say, size

        info = HfApi().model_info(name, revision=revision, files_metadata=True)
        total = sum(
            f.size or 0 for f in info.siblings if f.rfilename in _WANTED or f.rfilename.endswith(".safetensors")
        )
        licence = (info.card_data or {}).get("license", "not stated")
        say(f"{name} at {info.sha}: {size(total)} to fetch from the hub, licence {licence}.")
        return Path(snapshot_download(name, revision=info.sha, allow_patterns=patterns)), info.sha
    except Exception as reason:  # httpx, the hub's own and the system's: all mean the same to the reader
        raise BadRequest(
            f"{name} could not be fetched from the hub ({type(reason).__name__}): check the id, the revision "
            "and the network, or give a folder that holds the checkpoint."
        ) from reason
