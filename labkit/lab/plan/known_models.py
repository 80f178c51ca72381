"""Look up the shapes and parameter counts of well-known models.

The table is `data/known_models.json`. Its fields are those of each model's config.json
on the hub; `parameters` is the total of its safetensors files (each weight once, text
part only). A test rebuilds every count from the fields. DeepSeek-V3 is without its
prediction module.
"""

from __future__ import annotations

import json

from labkit.errors import BadRequest
from labkit.files import data_path

KNOWN_MODELS: dict[str, dict] = json.loads(data_path("known_models.json").read_text("utf-8"))
OTHER_NAMES = {
    "default": "smollm2-135m",
    "smollm2-135m-instruct": "smollm2-135m",
    "llama-3-8b": "llama-3.1-8b",
}


def known_config(name: str) -> dict:
    """Return the config of a known model.

    Case, owner and the ending -Instruct do not matter. Raises BadRequest for a model
    that is not in the table."""
    short = name.lower().rsplit("/", 1)[-1]
    short = OTHER_NAMES.get(short, short.removesuffix("-instruct").removesuffix("-it"))
    if short not in KNOWN_MODELS:
        raise BadRequest(
            f"Model {name!r} is not in the table of known models; choose one of "
            f"{', '.join(KNOWN_MODELS)}, or give a config.json."
        )
    return {**KNOWN_MODELS[short], "_name_or_path": short}
