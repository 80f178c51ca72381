"""Fetch a checkpoint from the Hugging Face hub.

Only configuration, tokenizer and safetensors files are fetched, never pickles or code. The
commit is returned, so that a result can name it. The size is printed before a download.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from labkit.errors import BadRequest
from labkit.files import say, size

_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "*.safetensors",
    "model.safetensors.index.json",
]


def fetch(name: str, revision: str | None = None) -> tuple[Path, str]:
    """Return the local folder of a hub checkpoint, and its commit.

    Files that were fetched before are used without network access. `revision` is a branch,
    tag or commit (None: the latest commit). Raises BadRequest if the checkpoint cannot be
    fetched.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as missing:
        raise BadRequest(
            f"{name} is a hub id and huggingface_hub is not installed: pip install huggingface_hub."
        ) from missing
    fetched: dict[str, Any] = {"repo_id": name, "allow_patterns": _PATTERNS}
    try:
        folder = Path(snapshot_download(**fetched, revision=revision, local_files_only=True))
        if any(folder.glob("*.safetensors")):
            return folder, folder.name
    except (OSError, ValueError):
        pass  # the files are not all on this machine
    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
        files = [f for f in info.siblings or () if any(fnmatch(f.rfilename, p) for p in _PATTERNS)]
        total = size(sum(file.size or 0 for file in files))
        licence = getattr(info.card_data, "license", None) or "not stated"
        say(f"{name} at {info.sha}: {total} to fetch from the hub, licence {licence}.")
        return Path(snapshot_download(**fetched, revision=info.sha)), str(info.sha)
    except Exception as reason:  # of the hub, of httpx or of the system
        raise BadRequest(
            f"{name} could not be fetched from the hub ({type(reason).__name__}); check the id, "
            "the revision and the network, or give a local folder."
        ) from reason
