"""Measure every number that the lab gives for a GPU (run by `figures/gpu.sh`).

    python figures/gpu.py [--model qwen2.5-1.5b] [--device cuda] [--out FILE]

Weights are random, in the shapes of a named model, so nothing is downloaded: the time
of a dense model does not depend on its numbers. Each result is a record with the
machine, the versions and the settings. With `--device cpu --model tiny` it is a
rehearsal whose numbers mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from labkit.generate import generate
from labkit.lab.bench import kernels
from labkit.lab.bench.harness import Arm, Run, compare, rate, ratios
from labkit.lab.bench.peers import timed_generate
from labkit.lab.cuda import best_dtype
from labkit.lab.cuda.attention_backends import attention_times
from labkit.lab.cuda.static_decoder import StaticDecoder
from labkit.lab.measure.bandwidth import read_bandwidth
from labkit.lab.measure.bytes import peak_memory, tensor_bytes
from labkit.lab.measure.clock import measure
from labkit.lab.measure.record import Record, RecordWriter
from labkit.lab.plan.known_models import KNOWN_MODELS, known_config
from labkit.lab.plan.memory import resolve
from labkit.model.config import ModelConfig
from labkit.model.decoder import Decoder
from labkit.model.load import empty
from labkit.model.tiny import tiny_config
from labkit.plan.time import step_cost
from labkit.quant import quantize_model

RECIPES = ("int8", "int4", "fp8_e4m3")  # next to the device's own 16-bit floats
LONG, SHORT = 4096, 128
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def config_of(name: str) -> ModelConfig:
    """Return the shapes of a known model, or of "tiny" for a rehearsal."""
    if name == "tiny":
        return tiny_config(max_positions=8192, hidden_size=64, intermediate_size=128, head_dim=16)
    return ModelConfig.from_hf(known_config(name))


@dataclass
class Measurements:
    """Measure one model; `write(what, item, value, unit, …)` records each result."""

    config: ModelConfig
    dtype: torch.dtype
    device: str
    bandwidth: float
    new_tokens: int
    write: Callable

    def random_model(self, recipe: str | None = None) -> Decoder:
        """Return a model with random weights, packed if a recipe is given."""
        model = empty(self.config, self.dtype, self.device)
        source = torch.Generator(device=self.device).manual_seed(0)
        for name, weight in model.named_parameters():
            weight.fill_(1.0) if "norm" in name else weight.normal_(0, 0.02, generator=source)
        if recipe is not None:
            quantize_model(model, recipe)
        return model

    def prompt(self, length: int) -> list[int]:
        return [i % self.config.vocab_size for i in range(3, 3 + length)]

    def arm(self, name: str, model: Decoder, generate_one: Callable, note: str, recipe=None) -> Arm:
        """Return labkit's own arm; `recipe` gives the bytes that a step reads."""

        def run(prompt, count: int) -> Run:
            done = generate_one(list(prompt), max_new_tokens=count, end_ids=())
            return Run(done.tokens, done.token_times_s)

        cost = recipe and step_cost(resolve(self.config), 1, 1, SHORT + 32, recipe)
        return Arm(name, run, cost and cost.bytes, note=note)

    def static_arm(self, name: str, model: Decoder, recipe: str) -> Arm:
        """Return the arm with steps of fixed shape, recorded as graphs on CUDA."""
        fast = StaticDecoder(model, 1, 1024)
        note = f"static, attention {fast.backend}, graphs {fast.graphs}"

        def one(prompt, **options):
            return fast.generate([prompt], **options)[0]

        return self.arm(name, model, one, note, recipe)

    def transformers_arm(self, model: Decoder) -> Arm:
        """Return `transformers` eager, with random weights of the same shapes."""
        from transformers import AutoConfig, AutoModelForCausalLM

        fields = self.config.to_hf()
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        with torch.device(self.device):
            decoder = AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval()
        run = timed_generate(decoder, self.device)
        return Arm("transformers", run, note="model.generate, eager")

    def decoding(self, model: Decoder) -> None:
        """Measure tok/s of every arm, the share of bandwidth, and the ratios."""
        plain = self.arm("plain", model, partial(generate, model), "operators one by one")
        arms = [self.static_arm("16", model, "bf16"), plain]
        for recipe in RECIPES:
            with peak_memory(self.device) as peak:
                packed = self.random_model(recipe)
            self.write("gpu.bytes", recipe, tensor_bytes(packed), "B", peak_bytes=peak.grown_bytes)
            arms.append(self.static_arm(recipe, packed, recipe))
        try:
            arms.append(self.transformers_arm(model))
        except ImportError as missing:
            self.write("gpu.decode", "transformers", None, "tok/s", why=str(missing))
        runs = compare(arms, self.prompt(SHORT), self.new_tokens, 3, self.device)
        seconds = {name: [run.tpot_s for run in kept] for name, kept in runs.items()}
        for arm in arms:
            speed = rate(seconds[arm.name])
            tok_s, low, high = speed.values()
            read = arm.bytes_per_step and arm.bytes_per_step * tok_s / self.bandwidth
            first = rate([run.ttft_s for run in runs[arm.name]])["tok_s"]
            details = {"bandwidth_share": read, "note": arm.note, "ttft_s": 1 / first}
            self.write("gpu.decode", arm.name, tok_s, "tok/s", low=low, high=high, n=3, **details)
        for pair, ratio in ratios(seconds).items():
            bounds = {"low": ratio.low, "high": ratio.high}
            self.write("gpu.decode.ratio", pair, ratio.value, "", **bounds, n=3)

    @torch.inference_mode()
    def steps(self, model: Decoder) -> None:
        """Measure five rows and one, a long and a short cache, and a prefill."""
        seconds = {}
        for name, rows, length in (("one", 1, SHORT), ("five", 5, SHORT), ("long", 1, LONG)):
            fast = StaticDecoder(model, rows, length + 512)
            fast.prefill([self.prompt(length)] * rows)
            fast.run(4)
            timing = measure(partial(fast.run, 16), repeats=7, device=self.device)
            seconds[name] = timing.median_s / 16
            self.write("gpu.step", name, seconds[name], "s", n=7)
            del fast
        self.write("gpu.step.ratio", "five rows/one", seconds["five"] / seconds["one"], "")
        self.write("gpu.step.ratio", f"{LONG} tokens/{SHORT}", seconds["long"] / seconds["one"], "")
        prompt = torch.tensor([self.prompt(512)], device=self.device)

        def prefill() -> None:
            model(prompt, model.new_cache(1, 512), last_only=True)

        with peak_memory(self.device) as peak:
            timing = measure(prefill, repeats=7, device=self.device)
        speed = 512 / timing.median_s
        self.write("gpu.prefill", "512", speed, "tok/s", n=7, peak_bytes=peak.grown_bytes)

    @torch.inference_mode()
    def attention(self) -> None:
        """Measure one layer's attention of one token with each of PyTorch's kernels."""
        layer = self.config.kv_shape.layers[0]
        place = {"dtype": self.dtype, "device": self.device}
        group = self.config.num_heads // layer.num_kv_heads
        for length in (512, LONG):
            keys = torch.zeros(1, layer.num_kv_heads, length, layer.head_dim, **place)
            queries = torch.zeros(1, layer.num_kv_heads, group, layer.head_dim, **place)
            mask = torch.ones(1, 1, 1, length, dtype=torch.bool, device=self.device)
            attend = partial(
                torch.nn.functional.scaled_dot_product_attention, queries, keys, keys.clone()
            )
            calls = {"no mask": attend, "mask": partial(attend, attn_mask=mask)}
            for name, call in calls.items():
                for kernel, seconds in attention_times(call, device=self.device).items():
                    item = f"{kernel}, {length} keys, {name}"
                    self.write("gpu.attention", item, seconds, "s", n=20)

    def kernels(self) -> None:
        """Measure the products of one layer in every recipe."""
        formats = (NAMES[self.dtype], *RECIPES)
        result = kernels.run(resolve(self.config), formats, device=self.device)
        for name, arm in result["arms"].items():
            details = {"n": result["repeats"], "bandwidth_share": arm["bandwidth_share"]}
            self.write("gpu.kernel", name, arm["us"] / 1e6, "s", **details)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--model", default="qwen2.5-1.5b", choices=["tiny", *KNOWN_MODELS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", default="figures/gpu.jsonl")
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args(arguments)
    device, dtype = options.device, best_dtype(options.device)
    facts = {"model": options.model, "dtype": str(dtype).removeprefix("torch."), "device": device}
    with RecordWriter(options.out) as records:

        def write(what: str, item: str, value, unit: str, n=1, low=None, high=None, **details):
            more = facts | {"item": item, "notes": "random weights", "details": details}
            records.write(Record(what, value, unit, n, low, high, **more))
            shown = "-" if value is None else format(value, ".4g")
            print(f"{what:18} {item:32} {shown} {unit} {details or ''}", flush=True)

        bandwidth = read_bandwidth(device)
        write("gpu.bandwidth", "read-only", bandwidth / 1e9, "GB/s")
        config = config_of(options.model)
        run = Measurements(config, dtype, device, bandwidth, options.new_tokens, write)
        run.attention()
        run.kernels()
        model = run.random_model()
        run.decoding(model)
        run.steps(model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
