"""The peers: other people's decoders on the same weights, prompt and number of tokens.

`transformers` is float32 and `transformers-bf16` bf16, on the same checkpoint; tokens are stamped by a streamer
as they arrive. `llama.cpp` reads the default model's own GGUF file, `llama.cpp-q4_0` that file requantised to Q4_0.
A peer that is not installed is refused in one sentence, so that no table silently lacks a column.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from labkit.bench import quantized_peers
from labkit.bench.harness import Arm, Run
from labkit.errors import BadRequest

PACKAGES = quantized_peers.PACKAGES | {
    "transformers": ("transformers",),
    "transformers-bf16": ("transformers",),
    "llama.cpp": ("llama_cpp",),
    "llama.cpp-q4_0": ("llama_cpp",),
}


def check(names: Sequence[str], known: Mapping[str, Sequence[str]] = PACKAGES) -> None:
    """Refuse unknown and missing peers before anything is loaded."""
    for name in names:
        if name not in known:
            raise BadRequest(f"peer {name!r} is not known here; choose from {', '.join(known)}.")
        if missing := [package for package in PACKAGES[name] if not _there(package)]:
            raise BadRequest(
                f"peer {name!r} needs the package {missing[0]}, which is not installed; run `make peers` or leave it out."
            )


def _there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def peer_arm(name: str, model: str, context: int, threads: int, device="cpu") -> Arm:
    check([name])
    if name.startswith("transformers"):
        return _transformers(name, model, device)
    if name.startswith("llama.cpp"):
        return _llama_cpp(name, model, context, threads)
    decoder = quantized_peers.quantized_peer(name, folder_of(model), device)
    return Arm(name, timed_generate(decoder, device), note=f"transformers, {quantized_peers.NOTES[name]}, head in bf16")


def folder_of(model: str) -> Path:
    """The safetensors folder that labkit itself loads."""
    path = Path(str(model))
    if path.is_dir():
        return path
    from labkit.assets import find
    from labkit.model.load import converted

    return converted(find(str(model)).name)


def _transformers(name: str, model: str, device) -> Arm:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
    decoder = AutoModelForCausalLM.from_pretrained(folder_of(model), dtype=dtype).to(device).eval()
    return Arm(name, timed_generate(decoder, device), note=f"model.generate, {str(dtype).removeprefix('torch.')}")


class _Stamps:
    """A streamer that notes when each token arrived; the first call carries the prompt."""

    def __init__(self):
        self.times: list[float] = []
        self.seen_prompt = False

    def put(self, value) -> None:
        if self.seen_prompt:
            self.times.append(time.perf_counter())
        self.seen_prompt = True

    def end(self) -> None:
        pass


def timed_generate(decoder, device):
    """The run of an arm: a transformers decoder's own `generate`, its tokens stamped as they arrive."""
    import torch

    def run(prompt: Sequence[int], count: int) -> Run:
        ids = torch.tensor([list(prompt)], device=device)
        stamps = _Stamps()
        start = time.perf_counter()
        with torch.inference_mode():
            out = decoder.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                streamer=stamps,
                pad_token_id=0,
                use_cache=True,
            )
        tokens = tuple(out[0, ids.shape[1] :].tolist())
        return Run(tokens, tuple(at - start for at in stamps.times))

    return run


def _gguf_of(model: str) -> Path:
    if str(model).endswith(".gguf"):
        return Path(model)
    from labkit.assets import asset_path

    path = Path(asset_path(str(model)))
    if path.suffix != ".gguf":
        raise BadRequest(f"{model} has no GGUF file for llama.cpp; give a .gguf file, or leave that peer out.")
    return path


def _llama_cpp(name: str, model: str, context: int, threads: int) -> Arm:
    import llama_cpp

    path = _gguf_of(model)
    if name.endswith("q4_0"):
        path = _requantised(path)
    llama = llama_cpp.Llama(str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(prompt: Sequence[int], count: int) -> Run:
        llama.reset()
        tokens, times, start = [], [], time.perf_counter()
        for token in llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0, reset=True):
            times.append(time.perf_counter() - start)
            tokens.append(int(token))
            if len(tokens) == count:
                break
        return Run(tuple(tokens), tuple(times))

    return Arm(name, run, bytes_per_step=float(path.stat().st_size), note=path.name)


def _requantised(path: Path) -> Path:
    """The same model in Q4_0, made once and kept beside labkit's other derived files."""
    import llama_cpp

    from labkit.assets import derived

    def build(folder: Path) -> None:
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
        parameters.allow_requantize = True
        out = str(folder / "q4_0.gguf").encode()
        if llama_cpp.llama_model_quantize(str(path).encode(), out, parameters):
            raise RuntimeError(f"llama.cpp could not requantise {path.name}.")

    return Path(derived(f"{path.stem}-q4_0", build)) / "q4_0.gguf"
