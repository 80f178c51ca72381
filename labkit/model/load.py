"""Load a model from a folder, a GGUF file or the hub.

    load("folder"), load("file.gguf"), load("small")    the last as `labkit quantize` wrote it
    load("HuggingFaceTB/SmolLM2-360M-Instruct", revision="<commit>")    from the hub

Names such as "default" are resolved by `labkit.lab.stack.open`.

Each weight is copied once, from the mapped file to its place in the decoder, converted on
the way, and unmapped before the next; two copies of the model never exist. Pickled weights
are not read.
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
from labkit.model.files.names import fill, places
from labkit.model.files.quantized import is_quantized, load_quantized
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
    """Return the decoder in a folder, a GGUF file or a hub id, in eval mode, without gradients.

    `known`: names that a caller resolves itself, listed in the error. `kernels`: of a quantized
    folder; "plain" keeps its weights as they lie in the file. Raises BadRequest.
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
        f"{name!r} is not a model that labkit knows{f' ({known})' if known else ''}, a folder, "
        "a .gguf file or a hub id (owner/name); give one of those."
    )


def load_folder(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    kernels: str | None = None,
) -> Decoder:
    """From config.json, *.safetensors (one file or shards with an index) and tokenizer.json (optional)."""
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
    """Return the configuration of a checkpoint's folder. Raises BadRequest if there is none."""
    if not (folder / "config.json").is_file():
        raise BadRequest(
            f"{folder} has no config.json: give the folder of a checkpoint in the hub's format."
        )
    said = read_json_object(folder / "config.json")
    if (folder / "generation_config.json").is_file():  # its end tokens are the fuller list
        generation = read_json_object(folder / "generation_config.json")
        said |= {
            k: v
            for k, v in generation.items()
            if k in ("eos_token_id", "pad_token_id") and v is not None
        }
    return ModelConfig.from_hf(said)


def load_gguf(path: str | Path, *, dtype: torch.dtype = torch.float32, device="cpu") -> Decoder:
    """Straight from the file, unpacking every weight (seconds); `convert_gguf` makes a folder that loads faster."""
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
    """A decoder whose weights are memory not yet written: nothing is initialised only to be overwritten."""
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
            f"the weights of this configuration need {size:,} bytes in {str(dtype).removeprefix('torch.')}, more than "
            f"{device} has free: choose a smaller model or dtype."
        ) from reason
    if config.tie_embeddings:
        model.head.weight = model.embed_tokens.weight
    return model.eval().requires_grad_(False)


def _tensors(folder: Path, model: Decoder) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = read_json_object(index).get("weight_map")
        if not isinstance(listed, dict) or not all(
            isinstance(shard, str) for shard in listed.values()
        ):
            raise BadRequest(
                f"{index} has no weight_map of tensors and their files: fetch it again."
            )
        shards = sorted(set(listed.values()))
        if any(Path(shard).name != shard for shard in shards):
            raise BadRequest(
                f"{index} points outside of its folder: this checkpoint is not to be trusted."
            )
    else:
        shards = ["model.safetensors"]
    wanted = set(places(model.config))
    for shard in shards:
        if not (folder / shard).is_file():
            raise BadRequest(
                f"{folder} lacks {shard}: weights are read from safetensors only, fetch or convert them."
            )
        try:
            with safe_open(folder / shard, framework="pt") as file:
                model.source |= file.metadata() or {}
                names = list(file.keys())
            for name in names:
                if (
                    name in wanted or name != "lm_head.weight"
                ):  # a tied head stored again is not read
                    # Opened anew for each tensor: pages of a mapping stay resident until it is closed.
                    with safe_open(folder / shard, framework="pt") as file:
                        tensor = file.get_tensor(name)
                    yield name, tensor
        except SafetensorError as reason:
            raise BadRequest(
                f"{folder / shard} is not a whole safetensors file ({reason}): fetch it again."
            ) from reason
