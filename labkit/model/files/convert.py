"""Convert GGUF to a folder in the hub's format, once; every later start only copies bytes.

    model.safetensors   weights under the hub's names, q and k rows in the hub's order, a tied head not repeated
    config.json, tokenizer.json, tokenizer_config.json (chat template inside): read by transformers too

The weights are stored in the smallest of float16, bfloat16 and float32 that holds each of them exactly. For block
types that is float32: Q4_1's `d * q + m` needs more digits than float16 has. The header says which file they came from
(SHA-256) and on which grid they lie, because a format that repeats the grid loses nothing on them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from labkit.errors import BadRequest
from labkit.model.config import ModelConfig
from labkit.model.files.gguf import GGUFFile
from labkit.model.files.gguf_config import config_from_gguf
from labkit.model.files.gguf_tokenizer import tokenizer_from_gguf
from labkit.model.tokenizer import Tokenizer

_GRIDS = {  # GGUF type -> the format of labkit that gives such weights back
    "Q4_1": "int4_g32_min",
    "Q8_0": "int8_g32_sym",
    "Q4_0": "int4_g32_sym",
}


def convert_gguf(gguf_path: str | Path, out_folder: str | Path) -> Path:
    """Writes `out_folder`, which appears whole or not at all; an empty folder may be there, a filled one is refused."""
    out = Path(out_folder)
    if out.exists() and any(out.iterdir()):
        raise BadRequest(f"{out} is not empty: give a folder that does not exist yet.")
    file = GGUFFile(gguf_path)
    config = config_from_gguf(file)
    tokenizer = tokenizer_from_gguf(file)
    weights = dict(file.tensors())
    dtype = smallest_exact(weights)
    weights = {name: weight.to(dtype).contiguous() for name, weight in weights.items()}

    scratch = out.with_name(f".{out.name}.{os.getpid()}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        with open(file.path, "rb") as source:
            digest = hashlib.file_digest(source, "sha256").hexdigest()
        types = file.types()
        common = max(
            (t for t in types if not t.startswith(("F", "BF"))),
            key=lambda kind: types[kind],
            default="none",
        )
        header = {
            "source": file.path.name,
            "source_sha256": digest,
            "source_types": json.dumps(types),
        }
        save_file(
            weights,
            scratch / "model.safetensors",
            {"format": "pt", "grid": _GRIDS.get(common, common), **header},
        )
        more = {"torch_dtype": str(dtype).removeprefix("torch.")}
        save_description(scratch, config, tokenizer, more)
        if out.exists():
            out.rmdir()
        os.replace(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return out


def smallest_exact(weights: dict[str, torch.Tensor]) -> torch.dtype:
    """The first of float16, bfloat16, float32 that holds every weight exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        if all(
            torch.equal(weight.to(dtype).to(weight.dtype), weight) for weight in weights.values()
        ):
            return dtype
    return torch.float32


def save_description(
    folder: Path, config: ModelConfig, tokenizer: Tokenizer | None, more: dict
) -> None:
    """Write config.json (with the keys of `more`) and the tokenizer's files, as transformers does."""
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
