"""Models from where they lie: a folder of safetensors, a GGUF file, the hub, or the lab's own default model.

    load_model()                                     the default model, fetched and converted on first use
    load_model("folder"), load_model("file.gguf"), load_model("small.safetensors")     the last as labkit quantize wrote it
    load_model("HuggingFaceTB/SmolLM2-360M-Instruct", revision="<commit>")    from the hub, where it is reachable

Each weight is copied once, from the mapped file to its place in the decoder, converted on the way, and unmapped before
the next, so that two copies of the model never exist. Pickled weights are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from labkit.errors import BadRequest
from labkit.measure.device import check_device
from labkit.model.config import ModelConfig
from labkit.model.decoder import Decoder
from labkit.model.names import fill, places
from labkit.model.settings import read_object
from labkit.model.tokenizer import Tokenizer

CONVERSION = 1  # part of the converted folder's name: raise it when what `convert_gguf` writes changes


def load_model(
    name_or_path: str | Path = "default",
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    revision: str | None = None,
) -> Decoder:
    """A decoder with its tokenizer, in eval mode and without gradients."""
    check_device(device)
    path = Path(name_or_path)
    if path.is_dir():
        return load_folder(path, dtype=dtype, device=device)
    if path.suffix == ".gguf":
        return load_gguf(path, dtype=dtype, device=device)
    if path.suffix == ".safetensors" and path.is_file():
        from labkit.model.quantized_file import load_quantized

        return load_quantized(path, dtype=dtype, device=device)
    name = str(name_or_path)
    from labkit.assets import registry

    assets = {alias: asset for asset in registry().values() for alias in (asset.name, *asset.aliases)}
    if name in assets and assets[name].kind == "model":
        model = load_folder(converted(assets[name].name), dtype=dtype, device=device)
        model.name, model.revision = assets[name].name, assets[name].revision
        return model
    if name.count("/") == 1 and not path.is_absolute() and not name.startswith("."):
        from labkit.model.hub import fetch

        folder, revision = fetch(name, revision)
        model = load_folder(folder, dtype=dtype, device=device)
        model.name, model.revision = name, revision
        return model
    raise BadRequest(
        f"{name!r} is no model that labkit knows ({', '.join(sorted(assets))}), no folder, no .gguf file and no "
        "hub id (owner/name): give one of those."
    )


def converted(asset: str) -> Path:
    """The folder that a model asset was turned into, made on first use."""
    from labkit.assets import asset_path, derived
    from labkit.assets.progress import say
    from labkit.model.convert import convert_gguf

    def build(folder: Path) -> None:
        say(f"Converting {asset} to safetensors, once.")
        convert_gguf(asset_path(asset), folder)

    return derived(f"{asset}-safetensors-{CONVERSION}", build)


def load_folder(folder: str | Path, *, dtype: torch.dtype = torch.float32, device="cpu") -> Decoder:
    """From config.json, *.safetensors (one file or shards with an index) and tokenizer.json (optional)."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise BadRequest(f"{folder} has no config.json: give the folder of a checkpoint in the hub's format.")
    said = read_object(folder / "config.json")
    if (folder / "generation_config.json").is_file():  # its end tokens are the fuller list
        generation = read_object(folder / "generation_config.json")
        said |= {k: v for k, v in generation.items() if k in ("eos_token_id", "pad_token_id") and v is not None}
    model = empty(ModelConfig.from_hf(said), dtype, device)
    fill(model, _tensors(folder, model), str(folder))
    if (folder / "tokenizer.json").is_file():
        model.tokenizer = Tokenizer.from_folder(folder, model.config.eos_ids, model.config.bos_id)
    model.name = folder.name
    return model


def load_gguf(path: str | Path, *, dtype: torch.dtype = torch.float32, device="cpu") -> Decoder:
    """Straight from the file, unpacking every weight (seconds); `convert_gguf` makes a folder that loads faster."""
    from labkit.model.gguf_file import GGUFFile
    from labkit.model.gguf_tokenizer import tokenizer_from_gguf

    file = GGUFFile(path)
    model = empty(ModelConfig.from_gguf(file), dtype, device)
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
        listed = read_object(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(shard, str) for shard in listed.values()):
            raise BadRequest(f"{index} has no weight_map of tensors and their files: fetch it again.")
        shards = sorted(set(listed.values()))
        if any(Path(shard).name != shard for shard in shards):
            raise BadRequest(f"{index} points outside of its folder: this checkpoint is not to be trusted.")
    else:
        shards = ["model.safetensors"]
    wanted = set(places(model.config))
    for shard in shards:
        if not (folder / shard).is_file():
            raise BadRequest(f"{folder} lacks {shard}: weights are read from safetensors only, fetch or convert them.")
        try:
            with safe_open(folder / shard, framework="pt") as file:
                model.source |= file.metadata() or {}
                names = list(file.keys())
            for name in names:
                if name in wanted or name != "lm_head.weight":  # a tied head stored again is not read
                    # Opened anew for each tensor: pages of a mapping stay resident until it is closed.
                    with safe_open(folder / shard, framework="pt") as file:
                        tensor = file.get_tensor(name)
                    yield name, tensor
        except SafetensorError as reason:
            raise BadRequest(
                f"{folder / shard} is not a whole safetensors file ({reason}): fetch it again."
            ) from reason
