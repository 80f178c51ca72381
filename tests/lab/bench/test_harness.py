"""Test the harness with arms whose times are known."""

import json

import pytest

from labkit.errors import BadRequest
from labkit.lab.bench import arms, decode, operators, peers, prefill
from labkit.lab.bench.arms import Load
from labkit.lab.bench.harness import Arm, Run, check_arms, compare, ratios
from labkit.lab.plan.memory import resolve
from labkit.model.tiny import tiny_model


def arm(name, tpot, log, first=0.5, emitted=None):
    def run(prompt, count):
        log.append((name, tuple(prompt), count))
        made = count if emitted is None else emitted
        return Run(tuple(range(made)), tuple(first + i * tpot for i in range(made)))

    return Arm(name, run, bytes_per_step=1e6)


def test_arms_are_interleaved_on_the_same_prompt_and_the_warm_up_is_not_counted():
    log = []
    runs = compare([arm("a", 0.1, log), arm("b", 0.2, log)], [1, 2], 5, repeats=2)
    assert [name for name, _, _ in log] == ["a", "b", "a", "b", "b", "a"]
    assert {(prompt, count) for _, prompt, count in log} == {((1, 2), 5)}
    assert {name: len(kept) for name, kept in runs.items()} == {"a": 2, "b": 2}
    assert runs["a"][0].tpot_s == pytest.approx(0.1) and runs["a"][0].ttft_s == 0.5


def test_an_arm_with_another_number_of_tokens_is_an_error():
    with pytest.raises(RuntimeError, match="generated 3 of 5 tokens"):
        compare([arm("a", 0.1, [], emitted=3)], [1], 5, repeats=1)


def test_ratios_compare_every_ordered_pair_and_a_slowdown_is_below_one():
    found = ratios({"slow": [2.0, 4.0, 6.0], "fast": [1.0, 2.0, 3.0], "same": [1.0, 2.0, 3.0]})
    assert set(found) == {
        "slow/fast",
        "fast/slow",
        "slow/same",
        "same/slow",
        "fast/same",
        "same/fast",
    }
    assert (
        found["fast/slow"].value == 2.0
        and found["slow/fast"].value == 0.5
        and found["same/fast"].value == 1.0
    )


@pytest.mark.parametrize("names", [[], ["a", "b", "a"]])
def test_no_arm_and_an_arm_named_twice_are_errors(names):
    with pytest.raises(BadRequest, match="name at least one, and each arm once"):
        check_arms(names)


def test_equal_first_tokens_are_counted():
    runs = {"a": [Run((1, 2, 3), (0, 0, 0))], "b": [Run((1, 2, 4), (0, 0, 0))]}
    measured = arms.Measured([Arm(name, None) for name in runs], runs, [], 1.0, {})
    entries = [decode.first_token(measured, arm) for arm in measured.arms]
    assert [entry["same_first_tokens"] for entry in entries] == [3, 2]


@pytest.fixture
def tiny(monkeypatch):
    """The benches on a tiny model, without a download and without minutes of microbenchmarks."""
    monkeypatch.setattr(
        "labkit.lab.stack.open.load_model", lambda name, dtype, device: tiny_model(dtype=dtype)
    )
    monkeypatch.setattr(arms, "read_bandwidth", lambda device, threads: 1e10)
    monkeypatch.setattr(operators, "BUDGET_S", 0.0)
    monkeypatch.setattr(operators, "cold_copies", lambda size: 2)
    monkeypatch.setattr(operators, "KEYS", (4, 16))
    monkeypatch.setattr(operators, "ROWS", (1, 8))


def test_bench_decode_gives_the_keys_of_the_command(tiny):
    settings = {"threads": 1, "prompt_tokens": 6, "new_tokens": 5, "repeats": 2}
    result = decode.run(Load(("fp32", "bf16"), kernels="torch", **settings))
    line = json.loads(json.dumps(result, allow_nan=False))
    assert {"arms", "ratios", "bandwidth_gb_s", "threads"} <= set(line)
    assert set(line["arms"]) == {"fp32", "bf16"} and set(line["ratios"]) == {
        "fp32/bf16",
        "bf16/fp32",
    }
    for entry in line["arms"].values():
        assert entry["tok_s"] == pytest.approx(1000 / entry["tpot_ms"])
        assert entry["bandwidth_share"] == pytest.approx(
            entry["roofline_tpot_ms"] / entry["tpot_ms"]
        )
        assert entry["predicted_tpot_ms"] > 0 and entry["predicted_ttft_ms"] > 0
    assert line["threads"] == 1 and line["bandwidth_gb_s"] == 10
    text = decode.render(result)
    assert "predicted" in text and "GB/s" in text
    assert "fp32/bf16" in text or "bf16/fp32" in text


def test_an_arm_names_the_kernels_that_it_uses(tiny, monkeypatch):
    """Native kernels if they work; PyTorch's operators if the native ones are off."""
    from labkit.errors import BadRequest
    from labkit.kernels.native import build as native
    from labkit.lab.stack.open import open_model as load

    def note(**options):
        load = Load(("int8",), (), "default", 6, 3, repeats=1, threads=1, **options)
        return decode.run(load)["arms"]["int8"]["note"]

    here = "native kernels" if native.unsupported_reason() is None else "PyTorch's operators"
    assert note().startswith(here) and note(kernels="torch") == "PyTorch's operators"
    with pytest.raises(BadRequest, match="auto, native, torch"):
        load("default", "int8", kernels="fast")
    monkeypatch.setenv("LABKIT_NATIVE", "off")
    assert note() == "PyTorch's operators"
    with pytest.raises(BadRequest):
        load("default", "int8", kernels="native")


def test_packed_weights_are_quantized_from_fp32_and_the_rest_runs_in_bf16(tiny):
    import torch

    from labkit.formats import round_to_nearest
    from labkit.lab.stack.open import open_model as load

    weight = tiny_model().layers[0].mlp.down.weight
    loaded = load("default", "int8", kernels="torch")
    assert (
        loaded.dtype == torch.bfloat16
        and loaded.embed_tokens(torch.tensor([1])).dtype == torch.bfloat16
    )
    stored = loaded.layers[0].mlp.down.weight.quantized().dequantize()
    assert torch.equal(stored, round_to_nearest(weight, "int8_channel").dequantize())
    assert not torch.equal(stored, round_to_nearest(weight.bfloat16(), "int8_channel").dequantize())


def test_bench_prefill_counts_prompt_tokens(tiny):
    result = prefill.run(Load(("fp32",), threads=1, prompt_tokens=12, repeats=1))
    entry = result["arms"]["fp32"]
    assert (
        entry["tok_s"] == pytest.approx(12 / (entry["ttft_ms"] / 1000)) and result["ratios"] == {}
    )
    assert "12 prompt tokens" in prefill.render(result)


def test_an_invalid_load_is_an_error_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr("labkit.lab.stack.open.load_model", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(BadRequest, match="vllm"):
        Load(peers=("vllm",))
    with pytest.raises(BadRequest, match="int9"):
        Load(("int9",))
    with pytest.raises(BadRequest, match="new_tokens is 1.* at least 2"):
        decode.run(Load(new_tokens=1))
    with pytest.raises(BadRequest, match="repeats is 0"):
        Load(repeats=0)


def test_a_missing_peer_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(BadRequest, match="make peers"):
        peers.check(["llama.cpp"])


def test_transformers_gets_the_same_prompt_and_times_each_token(tmp_path):
    transformers = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=64,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    from labkit.lab.bench.arms import labkit_arm
    from labkit.model.load import load_folder

    theirs = peers.peer_arm("transformers", str(tmp_path), 64, 1)
    ours = labkit_arm(load_folder(tmp_path), "fp32", Load(("fp32",), predicted=False))
    runs = compare([ours, theirs], [3, 1, 4, 1, 5], 6, repeats=1)
    assert runs["fp32"][0].tokens == runs["transformers"][0].tokens
    assert len(runs["transformers"][0].times_s) == 6
    assert list(runs["transformers"][0].times_s) == sorted(runs["transformers"][0].times_s)


def test_a_step_reads_the_tensors_of_the_model_and_its_cache():
    from labkit.lab.bench.arms import labkit_arm
    from labkit.lab.measure.bytes import tensor_bytes

    model = tiny_model()
    built = labkit_arm(model, "fp32", Load(prompt_tokens=10, new_tokens=4, predicted=False))
    shape = resolve(model.config)
    looked_up = 0 if shape.tied else (shape.vocab_size - 1) * shape.hidden_size * 4
    extra = shape.hidden_size * 4 if shape.tied else 0
    cache = (13 + 1) * 2 * sum(layer.num_kv_heads * layer.head_dim for layer in shape.kv.layers) * 4
    assert built.bytes_per_step == tensor_bytes(model) - looked_up + extra + cache


def test_a_peer_without_its_outer_package_is_an_error(monkeypatch):
    def none(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(peers, "find_spec", none)
    with pytest.raises(BadRequest, match="quanto-int8.*not installed"):
        peers.check(["quanto-int8"])


def test_a_peer_can_be_called_outside_inference_mode():
    import torch

    from labkit.lab.bench.peers import leave_inference_mode

    layer = torch.nn.Linear(3, 2)
    leave_inference_mode(layer)
    with torch.inference_mode():
        out = layer(torch.ones(1, 3))
    assert not out.is_inference() and not out.requires_grad
