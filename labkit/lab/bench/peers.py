"""The peers: other libraries' decoders on the same weights and prompt.

    transformers        float32; transformers-bf16 in bf16, on the same checkpoint
    llama.cpp           the default model's own GGUF file
    llama.cpp-q4_0      that file in Q4_0
    torchao             INT8 per channel, symmetric: the numbers of int8_channel
    torchao-int4        groups of 64 with a float middle: int4_g64_mid
    quanto-int8         optimum-quanto: INT8 per channel
    quanto-int4         groups of 128 with a float shift, unpacked on every call
    bitsandbytes-int8   LLM.int8(): activations are rounded too, except outliers
    bitsandbytes-nf4    16 quantiles of a normal distribution, blocks of 64

Quantized peers run in bf16 and leave the head in bf16. The head is tied to the
embedding, and a quantized head would be a second table. Each peer is set up as its own
documentation says. `make peers` installs the light ones. A peer that is not installed
is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

from labkit.errors import BadRequest
from labkit.lab.bench.harness import Arm, Run

# name -> the packages that it needs, and its note in the table
QUANTIZED = {
    "torchao": (("torchao",), "int8"),
    "torchao-int4": (("torchao",), "int4, groups of 64"),
    "quanto-int8": (("optimum.quanto", "accelerate"), "int8"),
    "quanto-int4": (("optimum.quanto", "accelerate"), "int4, groups of 128"),
    "bitsandbytes-int8": (("bitsandbytes", "accelerate"), "LLM.int8()"),
    "bitsandbytes-nf4": (("bitsandbytes", "accelerate"), "nf4, blocks of 64"),
}
PEERS = QUANTIZED | {
    "transformers": (("transformers",), "float32"),
    "transformers-bf16": (("transformers",), "bfloat16"),
    "llama.cpp": (("llama_cpp",), "its own file"),
    "llama.cpp-q4_0": (("llama_cpp",), "q4_0"),
}


def check(names: Sequence[str], known: Mapping[str, object] = PEERS) -> None:
    """Raise BadRequest for an unknown peer or one that is not installed."""
    for name in names:
        if name not in known:
            raise BadRequest(f"There is no peer {name!r}; choose from {', '.join(known)}.")
        for package in PEERS[name][0]:
            spec = None
            with suppress(ModuleNotFoundError):  # the package around it is missing
                spec = find_spec(package)
            if spec is None:
                fix = "run `make peers` or leave it out"
                raise BadRequest(f"Peer {name!r} needs {package}, which is not installed; {fix}.")


def peer_arm(name: str, model: str, context: int, threads: int, device="cpu") -> Arm:
    """Return the arm of a peer; `context` is the maximum number of tokens."""
    check([name])
    if name.startswith("llama.cpp"):
        return _llama_cpp(name, model, context, threads)
    folder, note = folder_of(model), PEERS[name][1]
    if name in QUANTIZED:
        decoder, note = quantized_peer(name, folder, device), f"{note}, head in bf16"
    else:
        decoder = _pretrained(folder, note).to(device)
    return Arm(name, timed_generate(decoder, device), note=f"transformers, {note}")


def folder_of(model: str) -> Path:
    """Return the safetensors folder that labkit itself loads."""
    from labkit.lab.assets import find
    from labkit.lab.stack.open import converted
    from labkit.model.files.quantized import is_quantized

    path = Path(str(model))
    if is_quantized(path):
        raise BadRequest(f"Peers cannot read {model}, quantized by labkit; give the original.")
    return path if path.is_dir() else converted(find(str(model)).name)


def _pretrained(folder, dtype: str = "bfloat16", **options):
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, dtype)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


def quantized_peer(name: str, folder, device="cpu"):
    """Return transformers' decoder in bf16 with its blocks quantized by a peer."""
    import torch

    if name.startswith("torchao"):
        decoder = _pretrained(folder).to(device)
        _torchao(decoder.model.layers, name, device)
        return decoder
    from transformers import BitsAndBytesConfig, QuantoConfig

    if name == "bitsandbytes-int8":
        config = BitsAndBytesConfig(load_in_8bit=True)
    elif name == "bitsandbytes-nf4":
        options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        config = BitsAndBytesConfig(load_in_4bit=True, **options)
    else:
        config = QuantoConfig(weights=name.removeprefix("quanto-"))
    decoder = _pretrained(folder, quantization_config=config, device_map=str(device))
    if name == "quanto-int4":
        leave_inference_mode(decoder)
    return decoder


def leave_inference_mode(decoder) -> None:
    """Run a decoder outside inference mode, which quanto's INT4 does not support."""
    import torch

    forward = decoder.forward

    @wraps(forward)
    def call(*args, **kwargs):
        with torch.inference_mode(False), torch.no_grad():
            return forward(*args, **kwargs)

    decoder.forward = call


def _torchao(layers, name: str, device) -> None:
    """Quantize layers in place; INT4 on CPUs is one of torchao's prototypes."""
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    if not name.endswith("int4"):
        return quantize_(layers, Int8WeightOnlyConfig())
    if torch.device(device).type != "cpu":
        raise BadRequest(f"Peer {name} runs on the CPU, not on {device}; leave it out.")
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return quantize_(layers, PrototypeInt4WeightOnlyConfig(group_size=64))


def timed_generate(decoder, device) -> Callable[[Sequence[int], int], Run]:
    """Return an arm's run: transformers' `generate`, with a time per token."""
    import torch

    def run(prompt: Sequence[int], count: int) -> Run:
        ids = torch.tensor([list(prompt)], device=device)
        times: list[float] = []  # of the prompt, then of each token

        def put(value) -> None:
            times.append(time.perf_counter())

        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        options |= {"pad_token_id": 0, "use_cache": True, "attention_mask": torch.ones_like(ids)}
        options["streamer"] = SimpleNamespace(put=put, end=lambda: None)
        start = time.perf_counter()
        with torch.inference_mode():
            out = decoder.generate(ids, **options)
        tokens = tuple(out[0, ids.shape[1] :].tolist())
        return Run(tokens, tuple(at - start for at in times[1:]))

    return run


def _llama_cpp(name: str, model: str, context: int, threads: int) -> Arm:
    import llama_cpp

    from labkit.lab.assets import asset_path

    path = Path(model if str(model).endswith(".gguf") else asset_path(str(model)))
    if path.suffix != ".gguf":
        raise BadRequest(f"{model} has no GGUF file for llama.cpp; give a .gguf file.")
    if name.endswith("q4_0"):
        path = _in_q4_0(path)
    options = {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads}
    llama = llama_cpp.Llama(str(path), verbose=False, **options)

    def run(prompt: Sequence[int], count: int) -> Run:
        llama.reset()
        start = time.perf_counter()
        stream = llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0, reset=True)
        emitted = [(int(token), time.perf_counter() - start) for token in islice(stream, count)]
        return Run(*map(tuple, zip(*emitted)))

    return Arm(name, run, bytes_per_step=float(path.stat().st_size), note=path.name)


def _in_q4_0(path: Path) -> Path:
    """Return the same model in Q4_0; the cache folder keeps it for the next time."""
    import llama_cpp

    from labkit.lab.assets import derived

    def build(folder: Path) -> None:
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
        parameters.allow_requantize = True
        out = str(folder / "q4_0.gguf").encode()
        if llama_cpp.llama_model_quantize(str(path).encode(), out, parameters):
            raise RuntimeError(f"llama.cpp could not write {path.name} in Q4_0.")

    return Path(derived(f"{path.stem}-q4_0", build)) / "q4_0.gguf"
