"""The default model in int8 and int4: bytes predicted, bytes of tensors, bytes of the process; five rows against one."""

import json
import pickle
import subprocess
import sys

import pytest
import torch

from labkit.lab.measure.bytes import tensor_bytes
from labkit.lab.measure.clock import interleave, ratio
from labkit.lab.stack.open import load_model
from labkit.model.files.quantized import save_weights
from labkit.quant import quantize_model
from labkit.quant.apply import predict

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

HELD = """
import ctypes, gc, json, pickle, sys, torch
from labkit.generate import generate
from labkit.lab.measure.bytes import resident_bytes, tensor_bytes
from labkit.model.decoder import Decoder
from labkit.lab.stack.open import load_model
from labkit.model.tiny import tiny_model
from labkit.model.files.quantized import load_weights, save_weights
from labkit.quant import quantize_model

def read(path, config):
    with torch.device("meta"):
        skeleton = Decoder(config)
    load_weights(path, skeleton)
    return skeleton

def counted():
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # freed, but not yet given back
    return resident_bytes()

tiny = tiny_model(hidden_size=128, intermediate_size=128)  # libraries are there before anything is counted
config = tiny.config
quantize_model(tiny, sys.argv[3])
save_weights(tiny, sys.argv[4])
generate(read(sys.argv[4], config), list(range(40)), max_new_tokens=2)
before = counted()
if sys.argv[1] == "fp32":
    model = load_model("default")
else:
    model = read(sys.argv[1], pickle.load(open(sys.argv[2], "rb")))
generate(model, list(range(100, 200)), max_new_tokens=4)  # a prefill, which may leave nothing behind
print(json.dumps([counted() - before, tensor_bytes(model)]))
"""


def quantized(*arguments) -> tuple[int, int]:
    """(growth of a fresh process, bytes of the model's tensors) after loading, a prefill and a few tokens."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HELD, *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


@pytest.mark.parametrize("recipe, most", [("int8", 0.27), ("int4", 0.20)])
def test_predicted_bytes_are_the_tensors_and_the_process_holds_no_second_copy(
    tmp_path, recipe, most
):
    model = load_model("default")
    full = tensor_bytes(model)
    promised = predict(model, recipe).nbytes
    report = quantize_model(model, recipe)
    tables = tensor_bytes(
        model.rotary
    )  # not parameters: cosines by position, which no recipe touches
    assert promised == report.nbytes == tensor_bytes(model) - tables
    assert promised <= most * full
    save_weights(model, tmp_path / "small.safetensors")
    (tmp_path / "config.pickle").write_bytes(pickle.dumps(model.config))
    del model
    others = (tmp_path / "config.pickle", recipe, tmp_path / "tiny.safetensors")
    process, tensors = quantized(tmp_path / "small.safetensors", *others)
    full_process, full_tensors = quantized("fp32", *others)
    assert tensors == promised + tables and full_tensors == full
    print(
        f"{recipe}: tensors {tensors / full:.3f} of float32's, process {process / full_process:.3f} ({process} B)"
    )
    assert (
        process <= tensors + 0.15 * full
    )  # activations, the cache and what the allocator keeps: no second copy
    assert full_process - process >= 0.8 * (full_tensors - tensors)


def step(model, rows: int):
    cache = model.new_cache(batch=rows, capacity=80)
    model(torch.arange(64).expand(rows, 64), cache, last_only=True)
    token = torch.ones(rows, 1, dtype=torch.long)

    def call() -> None:
        cache.rewind(64)
        for _ in range(8):
            model(token, cache, last_only=True)

    return call


@torch.inference_mode()
def test_five_rows_cost_less_than_two_and_a_half_times_one():
    """A bar for timings on a quiet machine; they are taken in turns, so a busy one slows both."""
    from labkit.lab.stack.open import open_model as load

    for recipe, most in (("int8", 2.5), ("int4", 2.5), ("bf16", 1.3)):
        model = load("default", recipe, kernels="torch")
        timings = interleave({"five": step(model, 5), "one": step(model, 1)}, repeats=5)
        found = ratio(timings["five"], timings["one"])
        print(
            f"{recipe}: five rows {found.value:.2f} [{found.low:.2f}, {found.high:.2f}] times one"
        )
        assert found.low <= most, recipe
