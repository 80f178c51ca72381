"""Look up the shapes and parameter counts of well-known models.

The table is `data/known_models.json`. Its fields are those of each model's config.json
on the hub. `parameters` is the number of weights in the safetensors files of the text
part, each counted once. A test computes it from the other fields. The entry of
DeepSeek-V3 does not count its module that predicts further tokens.
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

    Ignores case, the owner before the slash, and the ending -Instruct or -it. Raises
    BadRequest for a model that is not in the table.
    """
    short = name.lower().rsplit("/", 1)[-1]
    short = OTHER_NAMES.get(short, short.removesuffix("-instruct").removesuffix("-it"))
    if short not in KNOWN_MODELS:
        known = ", ".join(KNOWN_MODELS)
        raise BadRequest(f"Model {name!r} is not known; give a config.json or one of {known}.")
    return {**KNOWN_MODELS[short], "_name_or_path": short}
