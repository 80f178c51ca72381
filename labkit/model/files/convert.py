"""Convert a GGUF file to a folder in the hub's format.

    model.safetensors    weights under the hub's names, with q and k rows in the hub's order
    config.json, tokenizer.json, tokenizer_config.json (with the chat template)

Loading the folder is faster than loading the GGUF file, because it only copies bytes.
transformers reads the folder, too.

The weights get the smallest of float16, bfloat16 and float32 that stores each of them
exactly. For most block types this is float32: Q4_1's `d * q + m`, for example, needs more
digits than float16 has. The header of model.safetensors gives the name and SHA-256 of the
GGUF file, and the format in which labkit quantizes these weights without loss.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from labkit.errors import BadRequest
from labkit.files import publish, save_tensors
from labkit.model.config import ModelConfig
from labkit.model.files.gguf import GGUFFile
from labkit.model.files.gguf_config import config_from_gguf
from labkit.model.files.gguf_tokenizer import tokenizer_from_gguf
from labkit.model.tokenizer import Tokenizer

# GGUF type -> the format of labkit that represents such weights without loss
_GRIDS = {"Q4_1": "int4_g32_min", "Q8_0": "int8_g32_sym", "Q4_0": "int4_g32_sym"}


def convert_gguf(gguf_path: str | Path, out_folder: str | Path) -> Path:
    """Convert a GGUF file and return `out_folder`, the new folder.

    The folder appears when it is complete. Raises BadRequest if the folder exists and is
    not empty, or if labkit cannot read the file.
    """
    out = Path(out_folder)
    if out.exists() and any(out.iterdir()):
        raise BadRequest(f"{out} is not empty; give a new folder.")
    file = GGUFFile(gguf_path)
    config, tokenizer = config_from_gguf(file), tokenizer_from_gguf(file)
    weights = dict(file.tensors())
    dtype = smallest_exact(weights)
    with open(file.path, "rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    types = file.types()
    blocks = [kind for kind, _ in types.most_common() if not kind.startswith(("F", "BF"))]
    header = {
        "format": "pt",
        "grid": _GRIDS.get(blocks[0], blocks[0]) if blocks else "none",
        "source": file.path.name,
        "source_sha256": digest,
        "source_types": json.dumps(types),
    }
    with folder_in_progress(out) as scratch:
        weights = {name: weight.to(dtype) for name, weight in weights.items()}
        save_tensors(scratch / "model.safetensors", weights, header)
        more = {"torch_dtype": str(dtype).removeprefix("torch.")}
        save_description(scratch, config, tokenizer, more)
    return out


@contextmanager
def folder_in_progress(folder: Path) -> Iterator[Path]:
    """Yield a scratch folder, which replaces `folder` if the block raises no error."""
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
        yield scratch
        publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def smallest_exact(weights: dict[str, torch.Tensor]) -> torch.dtype:
    """Return the first of float16, bfloat16 and float32 that stores every weight exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        if all(
            torch.equal(weight.to(dtype).to(weight.dtype), weight) for weight in weights.values()
        ):
            return dtype
    return torch.float32


def save_description(
    folder: Path, config: ModelConfig, tokenizer: Tokenizer | None, more: dict
) -> None:
    """Write config.json and the tokenizer's files as transformers does.

    `more` is added to config.json.
    """
    _write(folder / "config.json", config.to_hf() | more)
    if tokenizer is None:
        return
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.add_bos,
        **{name: text for name, text in tokenizer.named.items() if name != "eot_token"},
        "chat_template": tokenizer.chat_template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_positions,
    }
    _write(folder / "tokenizer_config.json", settings)


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
