"""Everything that this lab says about GPUs, measured in one go: `labkit/bench/gpu.sh` runs it after the tests.

    python -m labkit.bench.gpu --out figures/gpu.jsonl [--model qwen2.5-1.5b] [--device cuda]

Weights are random, of the shapes of a named model, so that no hub is needed: the time of a dense model does not depend
on what it says. Each result is a record with the machine, the versions and what it was held to; a run that is broken off
goes on where it was. On a CPU with `--model tiny` it is a rehearsal, whose numbers mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch

from labkit.bench import kernels
from labkit.bench.harness import Arm, Run, compare, ratios, summary
from labkit.generate import generate
from labkit.generate.static import generate_static
from labkit.kernels.backends import attention_times
from labkit.measure.accelerator import best_dtype
from labkit.measure.bandwidth import read_bandwidth
from labkit.measure.bytes import peak_memory, tensor_bytes
from labkit.measure.clock import interleave
from labkit.measure.record import Record, RecordWriter
from labkit.model.config import ModelConfig
from labkit.model.decoder import Decoder
from labkit.model.load import empty
from labkit.model.static_decoder import StaticDecoder
from labkit.model.tiny import tiny_config
from labkit.plan.known_models import KNOWN_MODELS
from labkit.plan.memory import resolve
from labkit.plan.time import step_cost
from labkit.quant import quantize_model

RECIPES = ("int8", "int4", "fp8_e4m3")  # beside the device's own 16-bit floats
LONG, SHORT = 4096, 128


def config_of(name: str) -> ModelConfig:
    """The shapes of a known model; "tiny" for a rehearsal."""
    if name == "tiny":
        return tiny_config(max_positions=8192, hidden_size=64, intermediate_size=128, head_dim=16)
    return ModelConfig.from_hf(KNOWN_MODELS[name][1])


def random_model(config: ModelConfig, recipe: str, dtype: torch.dtype, device) -> Decoder:
    """Random weights on the device, packed in a recipe ("16": as they are). Two copies of the blocks never exist."""
    model = empty(config, dtype, device)
    source = torch.Generator(device=device).manual_seed(0)
    for name, weight in model.named_parameters():
        weight.fill_(1.0) if "norm" in name else weight.normal_(0, 0.02, generator=source)
    if recipe != "16":
        quantize_model(model, recipe)
    return model


def static_arm(name: str, model: Decoder, recipe: str, capacity: int) -> Arm:
    """Steps of fixed shape, recorded as graphs on CUDA."""
    fast = StaticDecoder(model, 1, capacity)

    def run(prompt, count) -> Run:
        done = generate_static(fast, [list(prompt)], max_new_tokens=count, end_ids=())[0]
        return Run(done.tokens, done.token_times_s)

    cost = step_cost(resolve(model.config), 1, 1, SHORT + 32, "bf16" if recipe == "16" else recipe)
    return Arm(name, run, cost.bytes, note=f"static, attention {fast.backend}, graphs {fast.graphs}")


def plain_arm(model: Decoder) -> Arm:
    """labkit's plain loop: operators one by one, one wait a token."""
    def run(prompt, count) -> Run:
        done = generate(model, list(prompt), max_new_tokens=count, end_ids=())
        return Run(done.tokens, done.token_times_s)

    return Arm("plain", run, note="operators one by one")


def transformers_arm(model: Decoder) -> Arm:
    """`transformers` eager, random weights of the same shapes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from labkit.bench.peers import timed_generate

    fields = model.config.to_hf()
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device(model.device):
        decoder = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
    return Arm("transformers", timed_generate(decoder, model.device), note="model.generate, eager")


def decoding(model: Decoder, config, dtype, device, bandwidth: float, new_tokens: int, write: Callable) -> None:
    """tok/s of every arm on the same prompt, in turns; share of bandwidth; ratios."""
    arms = [static_arm("16", model, "16", 1024), plain_arm(model)]
    for recipe in RECIPES:
        with peak_memory(device) as peak:
            packed = random_model(config, recipe, dtype, device)
        write("gpu.bytes", recipe, tensor_bytes(packed), "B", peak_bytes=peak.bytes - peak.start_bytes)
        arms.append(static_arm(recipe, packed, recipe, 1024))
    try:
        arms.append(transformers_arm(model))
    except ImportError as missing:
        write("gpu.decode", "transformers", None, "tok/s", why=str(missing))
    runs = compare(arms, [i % config.vocab_size for i in range(3, 3 + SHORT)], new_tokens, 3, device)
    seconds = {name: [run.tpot_s for run in kept] for name, kept in runs.items()}
    for arm in arms:
        middle, low, high = summary(seconds[arm.name])
        share = None if arm.bytes_per_step is None else arm.bytes_per_step / middle / bandwidth
        write("gpu.decode", arm.name, 1 / middle, "tok/s", low=1 / high, high=1 / low, n=3, bandwidth_share=share, note=arm.note,
              ttft_s=summary([run.ttft_s for run in runs[arm.name]])[0])  # fmt: skip
    for pair, ratio in ratios(seconds).items():
        write("gpu.decode.ratio", pair, ratio.value, "", low=ratio.low, high=ratio.high, n=3)


@torch.inference_mode()
def shapes_of_steps(model: Decoder, device, write: Callable) -> None:
    """Five rows against one, a long cache against a short one, a prompt of 512: static steps of the 16-bit model."""
    timings = {}
    for name, rows, length in (("one", 1, SHORT), ("five", 5, SHORT), ("long", 1, LONG)):
        fast = StaticDecoder(model, rows, length + 512)
        fast.prefill([[i % model.config.vocab_size for i in range(length)]] * rows)
        fast.run(4)
        timings[name] = interleave({name: lambda fast=fast: fast.run(16)}, repeats=7, device=device)[name].median_s / 16
        del fast
    for name, seconds in timings.items():
        write("gpu.step", name, seconds, "s", n=7)
    write("gpu.step.ratio", "five rows/one", timings["five"] / timings["one"], "")
    write("gpu.step.ratio", f"{LONG} tokens/{SHORT}", timings["long"] / timings["one"], "")
    prompt = torch.arange(512, device=device)[None] % model.config.vocab_size

    def prefill() -> None:
        model(prompt, model.new_cache(1, 512), last_only=True)

    with peak_memory(device) as peak:
        timing = interleave({"prefill": prefill}, repeats=7, device=device)["prefill"]
    write("gpu.prefill", "512", 512 / timing.median_s, "tok/s", n=7, peak_bytes=peak.bytes - peak.start_bytes)


@torch.inference_mode()
def attention_kernels(config, dtype, device, write: Callable) -> None:
    """Seconds of one layer's attention of one token, by PyTorch's kernels, without and with the static cache's mask."""
    layer = config.kv_shape.layers[0]
    for length in (512, LONG):
        keys, values = (torch.zeros(1, layer.num_kv_heads, length, layer.head_dim, dtype=dtype, device=device) for _ in "kv")
        queries = torch.zeros(1, layer.num_kv_heads, config.num_heads // layer.num_kv_heads, layer.head_dim, dtype=dtype, device=device)
        for name, mask in (("no mask", None), ("mask", torch.ones(1, 1, 1, length, dtype=torch.bool, device=device))):
            times = attention_times(
                lambda q=queries, k=keys, v=values, m=mask: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=m),
                device=device,
            )
            for kernel, seconds in times.items():
                write("gpu.attention", f"{kernel}, {length} keys, {name}", seconds, "s", n=20)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-1.5b", choices=["tiny", *KNOWN_MODELS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", default="figures/gpu.jsonl")
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args(arguments)
    device, config = options.device, config_of(options.model)
    dtype = best_dtype(device)
    with RecordWriter(options.out) as records:

        def write(what: str, item: str, value, unit: str, *, n: int = 1, low=None, high=None, **details) -> None:
            records.write(Record(what, value, unit, n, low, high, model=options.model, dtype=str(dtype).removeprefix("torch."),
                                 device=device, item=item, notes="random weights", details=details))  # fmt: skip
            print(f"{what:18} {item:32} {'-' if value is None else format(value, '.4g')} {unit} {details or ''}", flush=True)

        bandwidth = read_bandwidth(device)
        write("gpu.bandwidth", "read-only", bandwidth / 1e9, "GB/s")
        attention_kernels(config, dtype, device, write)
        table = kernels.run(resolve(config), ("bf16" if dtype == torch.bfloat16 else "fp16" if dtype == torch.float16 else "fp32", *RECIPES), device=device)
        for name, arm in table["arms"].items():
            write("gpu.kernel", name, arm["us"] / 1e6, "s", n=table["repeats"], bandwidth_share=arm["bandwidth_share"])
        model = random_model(config, "16", dtype, device)
        decoding(model, config, dtype, device, bandwidth, options.new_tokens, write)
        shapes_of_steps(model, device, write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
