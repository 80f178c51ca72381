"""Open any model in any recipe, on the fastest kernels available.

    open_model()                                the default model in fp32
    open_model("small", device="cuda")          a folder, a GGUF file, a hub id or a name
    open_model("default", "int4")               packed, on native kernels if they work
    open_model("default", "int4_g64_zp", method="gptq")

All commands, benches, evaluations and notebooks follow these rules:

- If `recipe` is None, fp32 or fp16, the model has the checkpoint's numbers in `dtype`
  (default: fp32) and runs on PyTorch.
- A folder that `labkit quantize` wrote keeps its own formats. `recipe` must be None. If
  a `dtype` is given, PyTorch's operators are used.
- For any other recipe, the weights are read in fp32 and then quantized. If they were
  read in bf16 first, they would be rounded twice.
- `kernels` "auto" uses the native kernels if they support model, recipe and device.
  Otherwise it uses PyTorch's operators, with bf16 for everything that is not packed.
  "native" uses the native kernels or raises BadRequest. "torch" never uses them.
"""

from __future__ import annotations

from pathlib import Path

import torch

from labkit.errors import BadRequest
from labkit.files import say
from labkit.formats import DTYPES, get_format, get_recipe, torch_dtype
from labkit.lab.assets import asset_path, derived, registry
from labkit.lab.stack.quantize import quantize_in_place
from labkit.lab.texts import training_text
from labkit.model.decoder import Decoder
from labkit.model.files.convert import convert_gguf
from labkit.model.files.quantized import WEIGHTS, is_quantized, read_header
from labkit.model.load import load, read_config
from labkit.model.native.decoder import accelerate, unsupported_reason
from labkit.model.native.parts import native_format, unsupported_formats
from labkit.quant.recipe import Recipe
from labkit.speculate import Drafter, make_drafter

# Part of the converted folder's name: raise it when what `convert_gguf` writes changes.
CONVERSION = 1
KERNELS = ("auto", "native", "torch")


def load_model(
    source: str | Path = "default",
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    revision: str | None = None,
) -> Decoder:
    """Return the decoder of a name, folder, GGUF file or hub id, with its tokenizer.

    Raises BadRequest if there is no such model.
    """
    assets = {a: asset for asset in registry().values() for a in (asset.name, *asset.aliases)}
    asset = assets.get(str(source))
    if asset is None or asset.kind != "model" or Path(source).is_dir():
        known = ", ".join(sorted(name for name, one in assets.items() if one.kind == "model"))
        return load(source, dtype=dtype, device=device, revision=revision, known=known)
    model = load(converted(asset.name), dtype=dtype, device=device)
    model.name, model.revision = asset.name, asset.revision
    return model


def converted(asset: str) -> Path:
    """Return the safetensors folder of a model asset, converted on first use."""

    def build(folder: Path) -> None:
        say(f"Converting {asset} to safetensors, once.")
        convert_gguf(asset_path(asset), folder)

    return derived(f"{asset}-safetensors-{CONVERSION}", build)


def open_model(
    source: str | Path = "default",
    recipe: str | None = None,
    *,
    method: str | None = None,
    kernels: str = "auto",
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> Decoder:
    """Return a model that is ready to generate; the module's docstring has the rules.

    `method` chooses the recipe's codes: rtn, gptq, awq, clip or a sum such as awq+gptq.
    None means the recipe's own method. `dtype` is for models without a recipe. Raises
    BadRequest if these options exclude each other.
    """
    if kernels not in KERNELS:
        raise BadRequest(f"There are no kernels {kernels!r}; choose one of {', '.join(KERNELS)}.")
    if recipe is None and method is not None:
        raise BadRequest(f"Method {method} needs a recipe; add for example recipe='int4_g64_zp'.")
    if recipe is not None and dtype is not None:
        raise BadRequest(f"Recipe {recipe} and dtype {dtype} exclude each other; give one of them.")
    if is_quantized(source):
        if recipe is not None:
            fix = "give the original model, or no recipe"
            raise BadRequest(f"{source} is quantized and cannot be quantized to {recipe}; {fix}.")
        return _open_quantized(Path(source), kernels, device, dtype)
    if recipe is None:
        return load_model(source, dtype=dtype or torch.float32, device=device)
    name = get_recipe(recipe).name
    native = kernels != "torch" and name not in ("fp32", "fp16") and str(device) == "cpu"
    first = name if name in DTYPES and not (native or method) else "fp32"
    model = load_model(source, dtype=torch_dtype(first), device=device)
    if native and (kernels == "native" or unsupported_reason(model.config, name) is None):
        if method is None:
            return accelerate(model, name, consume=True)
        quantize_in_place(model, Recipe.named(name), method, kernel="plain")
        return accelerate(model, consume=True)
    if name not in DTYPES or method is not None:
        quantize_in_place(model, Recipe.named(recipe), method)
    return model.to(torch_dtype(name if name in DTYPES else "bf16"))


def open_drafter(name: str, target: Decoder) -> Drafter:
    """Return the drafter `name` for `target`; see `labkit.speculate.make_drafter`.

    "trimmed" drafts only the tokens that are frequent in the training text.
    """
    kinds = ("code", "prose") if name == "trimmed" else ()
    text = "".join(training_text(kind, characters=500_000) for kind in kinds)
    return make_drafter(name, target, text or None)


def _open_quantized(
    folder: Path, kernels: str, device: str | torch.device, dtype: torch.dtype | None
) -> Decoder:
    """Open a quantized folder, on native kernels if they support its formats."""
    native = kernels != "torch" and dtype is None and str(device) == "cpu"
    if native and kernels == "auto":
        entries = read_header(folder / WEIGHTS)["formats"].values()
        formats = {native_format(get_format(entry["format"])) for entry in entries}
        native = not (unsupported_formats(formats) or unsupported_reason(read_config(folder)))
    kernel = "plain" if native else None
    model = load(folder, dtype=dtype or torch.float32, device=device, kernels=kernel)
    return accelerate(model, consume=True) if native else model
