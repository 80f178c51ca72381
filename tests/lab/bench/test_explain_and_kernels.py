"""Test step budgets, `bench kernels`, the ladder of notebook 14, and figures/gpu.py on a CPU."""

import time

import pytest
import torch

from fakes import load_script
from labkit.errors import BadRequest
from labkit.formats import round_to_nearest
from labkit.kernels import huge_pages as pages
from labkit.kernels.native import build as native
from labkit.lab.bench import explain, kernels
from labkit.lab.measure.record import read_records
from labkit.lab.plan.memory import resolve
from labkit.model.native.decoder import accelerate
from labkit.model.tiny import tiny_model
from labkit.plan.time import step_cost
from labkit_course.experiments.kernel_ladder import (
    climb,
    instruction_set,
    ladder,
    on_instruction_sets,
)

gpu = load_script("figures/gpu.py")
without_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
BLOCKS = dict(hidden_size=64, intermediate_size=128, head_dim=32)


@pytest.mark.parametrize("recipe", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_the_parts_add_up_to_those_of_the_step(recipe, tied):
    shape = resolve(tiny_model(tie_embeddings=tied, **BLOCKS).config)
    parts = explain.bytes_of(shape, recipe, 100, "bf16")
    del parts["sampling"]
    whole = step_cost(shape, 1, 1, 99, recipe, "bf16").bytes
    norms = (
        4 * (2 * shape.num_layers + 1) * shape.hidden_size
    )  # counted with the step's weights, and here as nothing
    assert whole - 2 * norms <= sum(parts.values()) <= whole


def test_a_stopwatch_counts_nested_parts_once():
    watch = explain.Stopwatch("cpu")
    watch.start("dispatch")
    watch.start("weights")
    time.sleep(0.02)
    watch.stop()
    watch.stop()
    assert watch.seconds["weights"] >= 0.02 > watch.seconds["dispatch"]


@without_compiler
@pytest.mark.parametrize("native_", [False, True])
def test_a_budget_has_every_part_and_does_not_change_the_model(native_):
    model = tiny_model(**BLOCKS)
    decoder = accelerate(model, "int4") if native_ else model
    ids = torch.tensor([[3, 4, 5]])
    before = decoder(ids)
    parts = explain.budget(
        decoder, "int4" if native_ else "fp32", resolve(model.config), [3, 4, 5], 1e10, steps=3
    )
    assert tuple(parts) == explain.PARTS
    assert all(
        parts[part]["measured_ms"] > 0
        for part in ("weights", "KV", "head", "norms", "rotary", "sampling")
    )
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in decoder.modules()
    )
    assert torch.equal(decoder(ids), before) and getattr(decoder, "spent", None) is None
    assert "weights" in explain.render("int4", parts)


@without_compiler
def test_the_native_clock_adds_up_to_the_call():
    model = accelerate(tiny_model(num_layers=8, **BLOCKS), "int4")
    cache, ids = model.new_cache(1), torch.ones(1, 256, dtype=torch.long)
    model(ids, cache)
    cache.rewind(0)
    start = time.perf_counter()
    with model.spending() as spent:
        model(ids, cache)
    took = time.perf_counter() - start
    assert 0 < sum(spent.values()) < took and spent["products"] > 0 and spent["attention"] > 0


def test_bench_kernels_has_the_documented_keys(monkeypatch):
    monkeypatch.setattr(kernels, "cold_copies", lambda size: 2)
    monkeypatch.setattr(kernels, "read_bandwidth", lambda device, threads: 1e10)
    result = kernels.run(resolve(tiny_model(**BLOCKS).config), ("fp32", "int4"), rows=2, repeats=2)
    arms = {"torch:fp32", "torch:int4"} | (
        {"native:int4"} if native.unsupported_reason() is None else set()
    )
    assert set(result["arms"]) == arms and result["rows"] == 2
    assert set(result["ratios"]) == {f"{a}/{b}" for a in arms for b in arms if a != b}
    assert "torch:int4" in kernels.render(result)
    with pytest.raises(BadRequest, match="rows is 0"):
        kernels.run("default", rows=0)


@without_compiler
def test_every_rung_of_the_ladder_has_the_same_numbers(monkeypatch):
    monkeypatch.setattr("labkit_course.experiments.kernel_ladder.cold_copies", lambda size: 2)
    weight, x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0)), torch.randn(3, 64)
    exact = x @ round_to_nearest(weight, "int4_g32_min").dequantize().T
    rungs = ladder(weight)
    assert {"float32", "bfloat16", "unpacked", "native"} <= set(rungs)
    for rung in rungs.values():
        for multiply in rung.copies:
            assert (
                multiply(x.to(rung.dtype)).float() - exact
            ).abs().max() < 0.02 * exact.abs().max()
    assert set(climb(rungs, 2, repeats=2)) == set(rungs)
    with instruction_set("portable"):
        assert native.chosen() == "portable"
    assert set(on_instruction_sets(weight, [native.chosen()])) == {native.chosen()}


@pytest.mark.parametrize("numbers", [0, 5, 2**21 + 3])
def test_memory_on_huge_pages_is_zero_writable_and_of_the_given_size(numbers):
    memory = pages.zeros(numbers, torch.float32)
    assert (
        memory.shape == (numbers,)
        and memory.untyped_storage().nbytes() == 4 * numbers
        and not memory.any()
    )
    if numbers:
        memory[-1] = 1
        assert memory.sum() == 1
    if numbers > 2**20:
        assert memory.data_ptr() % pages.HUGE_PAGE == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no packed kernel")
def test_the_gpu_measurements_run_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "LONG", 300)
    monkeypatch.setattr(gpu, "read_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(kernels, "read_bandwidth", lambda device, threads: 1e10)
    out = tmp_path / "gpu.jsonl"
    assert (
        gpu.main(["--model", "tiny", "--device", "cpu", "--new-tokens", "3", "--out", str(out)])
        == 0
    )
    found = {(record.what, record.item) for record in read_records(out)}
    assert {
        ("gpu.decode", "16"),
        ("gpu.decode", "int4"),
        ("gpu.decode", "transformers"),
        ("gpu.decode.ratio", "int4/16"),
        ("gpu.step.ratio", "five rows/one"),
        ("gpu.prefill", "512"),
        ("gpu.bandwidth", "read-only"),
    } <= found
