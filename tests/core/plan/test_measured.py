"""Compare predictions with the real model: peak memory of a run, and seconds of prefill and decode."""

import json
import statistics
import subprocess
import sys

import pytest

MIB = 2**20
RUN = """
import json, sys
import torch
from labkit.generate import generate
from labkit.lab.measure.bytes import peak_memory, resident_bytes
from labkit.lab.stack.open import converted, load_model
from labkit.model.load import empty
from labkit.model.tiny import tiny_config
from labkit.model.tokenizer import Tokenizer
import labkit.lab.assets, safetensors.torch
torch.set_num_threads(2)
torch.ones(64, 64) @ torch.ones(64, 64)
# The plan does not predict these: the interpreter, the libraries and a tokenizer. They are in memory before the run.
tokenizer = Tokenizer.from_folder(converted("smollm2-135m-instruct"), (), None)
del tokenizer
empty(tiny_config())
dtype, batch, prompt, new = sys.argv[1], *map(int, sys.argv[2:])
start = resident_bytes()
with peak_memory() as peak:
    model = load_model("default", dtype=getattr(torch, dtype))
    generate(model, [[i % 1000 for i in range(prompt)]] * batch, max_new_tokens=new, end_ids=())
print(json.dumps({"start": start, "peak": peak.bytes, "method": peak.method}))
"""


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize("dtype, name", [("float32", "fp32"), ("bfloat16", "bf16")])
@pytest.mark.parametrize("batch, prompt", [(1, 64), (1, 1024), (8, 256)])
def test_the_peak_of_a_run_is_within_a_tenth_or_100_mib_of_the_plan(dtype, name, batch, prompt):
    from labkit.lab.plan.memory import resolve
    from labkit.lab.plan.runtime import runtime_bytes
    from labkit.plan.kv import kv_bytes
    from labkit.plan.weights import weight_bytes

    model = resolve("default")
    out = subprocess.run(
        [sys.executable, "-c", RUN, dtype, str(batch), str(prompt), "4"],
        check=True,
        text=True,
        capture_output=True,
    ).stdout
    seen = json.loads(out.splitlines()[-1])
    predicted = (
        seen["start"]
        + weight_bytes(model, name)
        + kv_bytes(model.kv, prompt + 3, batch, name)
        + runtime_bytes(model, prompt, batch, name).total
    )
    error = seen["peak"] - predicted
    print(
        f"{name} {batch} x {prompt}: start {seen['start'] / MIB:.0f}, predicted {predicted / MIB:.0f}, "
        f"measured {seen['peak'] / MIB:.0f} MiB ({error / MIB:+.0f}), {seen['method']}"
    )
    assert abs(error) <= max(100 * MIB, 0.1 * seen["peak"])


@pytest.mark.real_model
@pytest.mark.slow
def test_predicted_times_on_twelve_settings():
    """Measure CPU seconds of one thread, so that other processes do not matter.

    The worst setting is only printed, because a single disturbance would decide it."""
    out = subprocess.run(
        [sys.executable, "-c", TIMES], check=True, text=True, capture_output=True
    ).stdout
    rows = json.loads(out.splitlines()[-1])
    errors = {
        (row["setting"], what): row[f"predicted_{what}"] / row[what] - 1
        for row in rows
        for what in ("ttft", "tpot")
    }
    print("\n".join(f"{setting} {what}: {error:+.0%}" for (setting, what), error in errors.items()))
    assert len(rows) >= 12
    assert statistics.median(abs(error) for error in errors.values()) <= 0.15
    print(f"worst {max(errors.values(), key=abs):+.0%}")


TIMES = """
import json, statistics, time
import torch
import labkit.generate.loop as loop
from labkit.generate import generate
import labkit.lab.measure.clock as clock
clock.now = loop.perf_counter = time.process_time
from labkit.lab.bench.arms import prompt_ids
from labkit.lab.bench.operators import measure_operators
from labkit.lab.stack.open import load_model
from labkit.lab.plan.memory import resolve
from labkit.lab.plan.operator_times import predict
torch.set_num_threads(1)
rows = []
for dtype in (torch.float32, torch.bfloat16):
    model = load_model("default", dtype=dtype)
    shape = resolve(model.config)
    times = measure_operators(shape, dtype, threads=1)
    for batch, prompt in ((1, 16), (1, 128), (1, 512), (4, 16), (4, 64), (16, 16)):
        guess = predict(shape, times, batch=batch, prompt_tokens=prompt, new_tokens=10)
        runs = [generate(model, [prompt_ids(model, prompt)] * batch, max_new_tokens=10, end_ids=())[0] for _ in range(3)]
        rows.append({"setting": f"{dtype} {batch} x {prompt}", "ttft": statistics.median(r.ttft_s for r in runs),
                     "tpot": statistics.median(r.tpot_s for r in runs), "predicted_ttft": guess.ttft_s,
                     "predicted_tpot": guess.tpot_s})
print(json.dumps(rows))
"""
