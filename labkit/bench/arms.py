"""The arms of the benches: labkit itself in each recipe, and the peers that are installed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from labkit.bench.explain import budget
from labkit.bench.harness import Arm, Run
from labkit.bench.operators import measure_operators
from labkit.errors import BadRequest
from labkit.formats import get_recipe
from labkit.generate import generate
from labkit.model.load import load_model
from labkit.model.native_decoder import NativeDecoder, accelerate, why_not
from labkit.plan.memory import resolve
from labkit.plan.predict import predict
from labkit.plan.time import step_cost

KERNELS = ("auto", "native", "torch")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TEXT = (
    "The quick answer to a slow question is often a measurement. Before the engineers changed a single line, "
    "they wrote down what they expected to see, and why; then they ran it twice, in turns, on the same machine. "
)


def load(model, recipe: str, device="cpu", kernels: str = "torch"):
    """The model in a recipe: from the disk in its dtype; or quantised from float32, with the rest in bf16.

    From a bf16 load the format would round numbers that were rounded once already, and miss a checkpoint's own grid.
    `kernels`: "torch" is PyTorch's operators; "native" is labkit's own stack, and refuses where there is none;
    "auto" is native where it works, else torch. float32 and float16 are always PyTorch's."""
    if kernels not in KERNELS:
        raise BadRequest(f"There are no kernels {kernels!r}; choose one of {', '.join(KERNELS)}.")
    if str(model).endswith(".safetensors"):
        raise BadRequest(f"{model} is quantised already and cannot be put into {recipe}; give the model it was made from.")
    name = get_recipe(recipe).name
    own = kernels != "torch" and name not in ("fp32", "fp16") and str(device) == "cpu"
    loaded = load_model(model, dtype=torch.float32 if own else DTYPES.get(name, torch.float32), device=device)
    if own and (kernels == "native" or why_not(loaded.config, name) is None):
        return accelerate(loaded, name, consume=True)
    if name not in DTYPES:
        from labkit.quant import quantize_model

        quantize_model(loaded, name)
    return loaded.to(DTYPES.get(name, torch.bfloat16))


def prompt_ids(decoder, count: int) -> list[int]:
    """`count` token ids of plain prose; without a tokenizer, ids in turn."""
    if decoder.tokenizer is None:
        return [i % decoder.config.vocab_size for i in range(count)]
    ids: list[int] = []
    while len(ids) < count:
        ids.extend(decoder.tokenizer.encode(TEXT))
    return ids[:count]


def labkit_arm(
    decoder, recipe: str, prompt_tokens: int, new_tokens: int, *, device="cpu", threads=None, predicted: bool = True
) -> Arm:
    """labkit's own loop, with what a step reads and, for PyTorch's dtypes, what the microbenchmarks predict."""
    shape = resolve(decoder.config)
    plain = get_recipe(recipe).name in DTYPES
    kv_format = get_recipe(recipe).name if plain else "bf16"  # packed recipes keep keys and values in bf16
    cost = step_cost(shape, 1, 1, prompt_tokens + new_tokens // 2, recipe, kv_format)
    native = isinstance(decoder, NativeDecoder)
    ttft = tpot = None
    if predicted and plain and not native and not shape.num_experts:
        times = measure_operators(
            shape, DTYPES[get_recipe(recipe).name], device=device, threads=threads, max_rows=prompt_tokens, max_batch=1
        )
        guess = predict(shape, times, prompt_tokens=prompt_tokens, new_tokens=max(new_tokens, 2))
        ttft, tpot = guess.ttft_s, guess.tpot_s

    def run(prompt: Sequence[int], count: int) -> Run:
        done = generate(decoder, list(prompt), max_new_tokens=count, end_ids=())
        return Run(done.tokens, done.token_times_s)

    note = f"native kernels, {decoder.instruction_set}" if native else "PyTorch's operators"
    return Arm(recipe, run, cost.bytes, ttft, tpot, note, partial(budget, decoder, recipe, shape, kv_format=kv_format))
