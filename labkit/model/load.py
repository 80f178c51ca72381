"""Load a model from a folder, a GGUF file or the hub.

    load("folder")       # a checkpoint in the hub's format, or one that labkit quantized
    load("file.gguf")
    load("HuggingFaceTB/SmolLM2-360M-Instruct", revision="<commit>")

`labkit.lab.stack.open` also accepts names such as "default".

Loading copies each weight once, from the mapped file to the decoder, and converts it on the
way. Each weight is unmapped before the next is read, so memory never contains two copies of
the model. labkit does not read pickled weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from labkit.errors import BadRequest
from labkit.files import read_json_object
from labkit.kernels.device import check_device
from labkit.model.config import ModelConfig
from labkit.model.decoder import Decoder
from labkit.model.files.names import fill
from labkit.model.files.quantized import each_tensor, is_quantized, load_quantized
from labkit.model.tokenizer import Tokenizer


def load(
    source: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    known: str = "",
    kernels: str | None = None,
) -> Decoder:
    """Return the decoder from a folder, a GGUF file or a hub id.

    The decoder is in eval mode, without gradients.

    source: a folder, the path of a .gguf file, or a hub id (owner/name).
    revision: branch, tag or commit in the hub.
    known: names that the caller handles itself, for the error.
    kernels: as in `load_weights`, for a folder that labkit quantized.

    Raises BadRequest if the source cannot be found or read.
    """
    check_device(device)
    path, name = Path(source), str(source)
    if path.is_dir():
        return load_folder(path, dtype=dtype, device=device, kernels=kernels)
    if path.suffix == ".gguf":
        return load_gguf(path, dtype=dtype, device=device)
    if name.count("/") == 1 and not path.is_absolute() and not name.startswith("."):
        from labkit.model.files.hub import fetch

        folder, revision = fetch(name, revision)
        model = load_folder(folder, dtype=dtype, device=device)
        model.name, model.revision = name, revision
        return model
    raise BadRequest(
        f"There is no model {name!r}; give {f'one of {known}, ' if known else ''}a folder, "
        "a .gguf file or a hub id (owner/name)."
    )


def load_folder(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    kernels: str | None = None,
) -> Decoder:
    """Return the decoder in a folder in the hub's format.

    The folder has config.json, model.safetensors (or shards with an index) and, optionally,
    tokenizer.json. Raises BadRequest if a file is missing or damaged.
    """
    folder = Path(folder)
    config = read_config(folder)
    if is_quantized(folder):
        model = load_quantized(folder, config, dtype, device, kernels)
    else:
        model = empty(config, dtype, device)
        fill(model, _tensors(folder, model), str(folder))
        model.name = folder.name
    if (folder / "tokenizer.json").is_file():
        model.tokenizer = Tokenizer.from_folder(folder, model.config.eos_ids, model.config.bos_id)
    return model


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration in a checkpoint's folder.

    End and padding tokens of generation_config.json replace those of config.json, because
    its list is more complete. Raises BadRequest if the folder has no valid config.json.
    """
    if not (folder / "config.json").is_file():
        raise BadRequest(f"{folder} has no config.json; give a checkpoint in the hub's format.")
    config = read_json_object(folder / "config.json")
    if (path := folder / "generation_config.json").is_file():
        generation = read_json_object(path)
        keys = ("eos_token_id", "pad_token_id")
        config |= {key: generation[key] for key in keys if generation.get(key) is not None}
    return ModelConfig.from_hf(config)


def load_gguf(path: str | Path, *, dtype: torch.dtype = torch.float32, device="cpu") -> Decoder:
    """Return the decoder in a GGUF file.

    This unpacks every weight, which takes seconds. `convert_gguf` makes a folder that loads
    faster. Raises BadRequest if labkit cannot read the file.
    """
    from labkit.model.files.gguf import GGUFFile
    from labkit.model.files.gguf_config import config_from_gguf
    from labkit.model.files.gguf_tokenizer import tokenizer_from_gguf

    file = GGUFFile(path)
    model = empty(config_from_gguf(file), dtype, device)
    fill(model, file.tensors(), file.path.name)
    model.tokenizer = tokenizer_from_gguf(file)
    model.name = file.path.stem
    return model


def empty(config: ModelConfig, dtype: torch.dtype = torch.float32, device="cpu") -> Decoder:
    """Return a decoder with weights that are not initialized.

    Raises BadRequest if the device has too little memory.
    """
    check_device(device)
    with torch.device("meta"):
        model = Decoder(config)
    model = model.to(dtype)
    try:
        model = model.to_empty(device=device)
    except RuntimeError as reason:
        if "memory" not in str(reason):
            raise
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        raise BadRequest(
            f"The weights need {size:,} bytes in {str(dtype).removeprefix('torch.')}, more than "
            f"{device} has free; choose a smaller model or dtype."
        ) from reason
    if config.tie_embeddings:
        model.head.weight = model.embed_tokens.weight
    return model.eval().requires_grad_(False)


def _tensors(folder: Path, model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a checkpoint; add the metadata of its files to the model."""
    from safetensors import SafetensorError, safe_open

    shards, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if index.is_file():
        files = read_json_object(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise BadRequest(f"{index} has no weight_map of tensors to files; fetch it again.")
        shards = sorted(set(files.values()))
    for shard in shards:
        path = folder / shard
        if path.parent != folder:
            raise BadRequest(
                f"{index} names {shard}, outside its folder; do not use this checkpoint."
            )
        if not path.is_file():
            raise BadRequest(f"{folder} lacks {shard}; labkit reads weights from safetensors only.")
        try:
            with safe_open(path, framework="pt") as file:
                model.source |= file.metadata() or {}
            yield from each_tensor(path)
        except SafetensorError as reason:
            raise BadRequest(
                f"{path} is not a complete safetensors file ({reason}); fetch it again."
            ) from reason
