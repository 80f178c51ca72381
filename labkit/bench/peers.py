"""The peers: other people's decoders on the same weights, prompt and number of tokens.

`transformers` is float32 and `transformers-bf16` bf16, on the same checkpoint; tokens are stamped by a streamer
as they arrive. `llama.cpp` reads the default model's own GGUF file, `llama.cpp-q4_0` that file requantised to Q4_0.
A peer that is not installed is refused in one sentence, so that no table silently lacks a column.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from labkit.bench.harness import Arm, Run
from labkit.errors import BadRequest

PACKAGES = {
    "transformers": "transformers",
    "transformers-bf16": "transformers",
    "llama.cpp": "llama_cpp",
    "llama.cpp-q4_0": "llama_cpp",
    "torchao": "torchao",
    "torchao-int4": "torchao",
}


def check(names: Sequence[str]) -> None:
    """Refuse unknown and missing peers before anything is loaded."""
    for name in names:
        if name not in PACKAGES:
            raise BadRequest(f"peer {name!r} is not known; choose from {', '.join(PACKAGES)}.")
        if find_spec(PACKAGES[name]) is None:
            raise BadRequest(
                f"peer {name!r} needs the package {PACKAGES[name]}, which is not installed; "
                "run `make peers` or leave it out."
            )


def peer_arm(name: str, model: str, context: int, threads: int, device="cpu") -> Arm:
    check([name])
    if name.startswith("transformers"):
        return _transformers(name, model, device)
    if name.startswith("llama.cpp"):
        return _llama_cpp(name, model, context, threads)
    return _torchao(name, model, device)


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
    return Arm(name, _generate_with(decoder, device), note=f"model.generate, {str(dtype).removeprefix('torch.')}")


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


def _generate_with(decoder, device):
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


def torchao_model(name: str, model: str, device="cpu"):
    """transformers' decoder in bf16 with torchao's weight-only linears in the blocks, as its guide quantises: from bf16.

    `torchao`: INT8 per channel, symmetric: the numbers of int8_channel. `torchao-int4`: groups of 64 with a float middle
    in torch's tinygemm layout, the numbers of int4_g64_mid. torchao keeps the CPU's INT4 layout among its prototypes.
    The head stays in bf16: quantize_ would leave the tied embedding behind as a second table."""
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from transformers import AutoModelForCausalLM

    config = Int8WeightOnlyConfig()
    if name.endswith("int4"):
        if torch.device(device).type != "cpu":
            raise BadRequest("peer 'torchao-int4' is set up for the CPU's layout; leave it out on other devices.")
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        config = PrototypeInt4WeightOnlyConfig(group_size=64)
    decoder = AutoModelForCausalLM.from_pretrained(folder_of(model), dtype=torch.bfloat16).to(device).eval()
    quantize_(decoder.model.layers, config)
    return decoder


def _torchao(name: str, model: str, device) -> Arm:
    kind = "int4, groups of 64" if name.endswith("int4") else "int8"
    return Arm(name, _generate_with(torchao_model(name, model, device), device), note=f"transformers, {kind}, head in bf16")


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
