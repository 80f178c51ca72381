"""The harness with arms whose times are known: interleaved, equal tokens, ratios, slowdowns named as such."""

import json

import pytest

from labkit.bench import decode, operators, peers, prefill
from labkit.bench.harness import Arm, Run, agreement, as_json, compare, ratio_lines, ratios
from labkit.errors import BadRequest
from labkit.model.tiny import tiny_model
from labkit.plan.memory import resolve


def arm(name, tpot, log, first=0.5, emitted=None):
    def run(prompt, count):
        log.append((name, tuple(prompt), count))
        made = count if emitted is None else emitted
        return Run(tuple(range(made)), tuple(first + i * tpot for i in range(made)))
    return Arm(name, run, bytes_per_step=1e6)


def test_arms_take_turns_on_the_same_prompt_and_warm_up_is_left_out():
    log = []
    runs = compare([arm("a", 0.1, log), arm("b", 0.2, log)], [1, 2], 5, repeats=2)
    assert [name for name, _, _ in log] == ["a", "b", "a", "b", "b", "a"]
    assert {(prompt, count) for _, prompt, count in log} == {((1, 2), 5)}
    assert {name: len(kept) for name, kept in runs.items()} == {"a": 2, "b": 2}
    assert runs["a"][0].tpot_s == pytest.approx(0.1) and runs["a"][0].ttft_s == 0.5


def test_an_arm_that_emits_another_number_of_tokens_is_not_compared():
    with pytest.raises(RuntimeError, match="emitted 3 tokens where 5"):
        compare([arm("a", 0.1, [], emitted=3)], [1], 5, repeats=1)


def test_ratios_are_of_speed_for_every_ordered_pair_and_a_slowdown_is_below_one():
    found = ratios({"slow": [2.0, 4.0, 6.0], "fast": [1.0, 2.0, 3.0], "same": [1.0, 2.0, 3.0]})
    assert set(found) == {"slow/fast", "fast/slow", "slow/same", "same/slow", "fast/same", "same/fast"}
    assert found["fast/slow"].value == 2.0 and found["slow/fast"].value == 0.5 and found["same/fast"].value == 1.0


def test_agreement_counts_the_tokens_in_common():
    assert agreement([Run((1, 2, 3), (0, 0, 0))], [Run((1, 2, 4), (0, 0, 0))]) == 2


@pytest.fixture
def tiny(monkeypatch):
    """The benches on a tiny model, without a download and without minutes of microbenchmarks."""
    import labkit.bench.arms as arms
    monkeypatch.setattr(arms, "load_model", lambda name, dtype, device: tiny_model(dtype=dtype))
    monkeypatch.setattr(decode, "read_bandwidth", lambda device, threads: 1e10)
    monkeypatch.setattr(prefill, "read_bandwidth", lambda device, threads: 1e10)
    monkeypatch.setattr(operators, "BUDGET_S", 0.0)
    monkeypatch.setattr(operators, "cold_copies", lambda size: 2)
    monkeypatch.setattr(operators, "KEYS", (4, 16))
    monkeypatch.setattr(operators, "ROWS", (1, 8))


def test_bench_decode_gives_the_keys_of_the_command(tiny):
    result = decode.run(formats=("fp32", "bf16"), threads=1, prompt_tokens=6, new_tokens=5, repeats=2, kernels="torch")
    line = json.loads(as_json(result))
    assert {"arms", "ratios", "bandwidth_gb_s", "threads"} <= set(line)
    assert set(line["arms"]) == {"fp32", "bf16"} and set(line["ratios"]) == {"fp32/bf16", "bf16/fp32"}
    for entry in line["arms"].values():
        assert entry["tok_s"] == pytest.approx(1000 / entry["tpot_ms"])
        assert entry["bandwidth_share"] == pytest.approx(entry["roofline_tpot_ms"] / entry["tpot_ms"])
        assert entry["predicted_tpot_ms"] > 0 and entry["predicted_ttft_ms"] > 0
    assert line["threads"] == 1 and line["bandwidth_gb_s"] == 10
    text = decode.render(result)
    assert "predicted" in text and "GB/s" in text and ratio_lines(result)


def test_the_kernels_of_an_arm_are_chosen_and_said(tiny, monkeypatch):
    """Native where they work, PyTorch's operators where they are switched off, a refusal where they were asked for."""
    from labkit.bench.arms import load
    from labkit.errors import BadRequest
    from labkit.kernels import native

    def note(**options):
        return decode.run(formats=("int8",), threads=1, prompt_tokens=6, new_tokens=3, repeats=1, **options)["arms"]["int8"]["note"]

    here = "native kernels" if native.why_not() is None else "PyTorch's operators"
    assert note().startswith(here) and note(kernels="torch") == "PyTorch's operators"
    with pytest.raises(BadRequest, match="auto, native, torch"):
        load("default", "int8", kernels="fast")
    monkeypatch.setenv("LABKIT_NATIVE", "off")
    assert note() == "PyTorch's operators"
    with pytest.raises(BadRequest):
        load("default", "int8", kernels="native")


def test_packed_weights_are_rounded_once_from_float32_and_the_rest_runs_in_bf16(tiny):
    import torch

    from labkit.bench.arms import load
    from labkit.formats import quantize

    weight = tiny_model().layers[0].mlp.down.weight
    loaded = load("default", "int8")
    assert loaded.dtype == torch.bfloat16 and loaded.embed_tokens(torch.tensor([1])).dtype == torch.bfloat16
    held = loaded.layers[0].mlp.down.weight.quantized().dequantize()
    assert torch.equal(held, quantize(weight, "int8_channel").dequantize())
    assert not torch.equal(held, quantize(weight.bfloat16(), "int8_channel").dequantize())


def test_bench_prefill_counts_prompt_tokens(tiny):
    result = prefill.run(formats=("fp32",), threads=1, prompt_tokens=12, repeats=1)
    entry = result["arms"]["fp32"]
    assert entry["tok_s"] == pytest.approx(12 / (entry["ttft_ms"] / 1000)) and result["ratios"] == {}
    assert "12 prompt tokens" in prefill.render(result)


def test_what_cannot_be_benched_is_refused_before_anything_is_loaded(monkeypatch):
    import labkit.bench.arms as arms
    monkeypatch.setattr(arms, "load_model", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(BadRequest, match="vllm"):
        decode.run(peers=("vllm",))
    with pytest.raises(BadRequest, match="int9"):
        decode.run(formats=("int9",))
    with pytest.raises(BadRequest, match="time nothing"):
        decode.run(new_tokens=1)


def test_a_missing_peer_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(BadRequest, match="make peers"):
        peers.check(["llama.cpp"])


def test_transformers_is_given_the_same_tokens_and_stamps_each_one(tmp_path):
    transformers = pytest.importorskip("transformers")
    import torch
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                      intermediate_size=48, vocab_size=64, max_position_embeddings=64)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    from labkit.bench.arms import labkit_arm
    from labkit.model.load import load_folder
    theirs = peers.peer_arm("transformers", str(tmp_path), 64, 1)
    ours = labkit_arm(load_folder(tmp_path), "fp32", 5, 6, predicted=False)
    runs = compare([ours, theirs], [3, 1, 4, 1, 5], 6, repeats=1)
    assert runs["fp32"][0].tokens == runs["transformers"][0].tokens
    assert len(runs["transformers"][0].times_s) == 6
    assert list(runs["transformers"][0].times_s) == sorted(runs["transformers"][0].times_s)


def test_what_a_step_must_read_is_the_tensors_of_the_model_and_its_cache():
    from labkit.bench.arms import labkit_arm
    from labkit.measure.bytes import tensor_bytes
    model = tiny_model()
    built = labkit_arm(model, "fp32", 10, 4, predicted=False)
    shape = resolve(model.config)
    looked_up = 0 if shape.tied else (shape.vocab_size - 1) * shape.hidden_size * 4
    extra = shape.hidden_size * 4 if shape.tied else 0
    cache = (13 + 1) * 2 * sum(layer.num_kv_heads * layer.head_dim for layer in shape.kv.layers) * 4
    assert built.bytes_per_step == tensor_bytes(model) - looked_up + extra + cache


def test_a_peer_whose_outer_package_is_missing_is_refused_too(monkeypatch):
    def none(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(peers, "find_spec", none)
    with pytest.raises(BadRequest, match="quanto-int8.*not installed"):
        peers.check(["quanto-int8"])


def test_a_quantised_file_is_not_benched_under_another_recipes_name():
    from labkit.bench.arms import load

    with pytest.raises(BadRequest, match="small.safetensors is quantised already.*fp32"):
        load("small.safetensors", "fp32")


def test_a_peer_that_inference_mode_stops_is_called_outside_it():
    import torch

    from labkit.bench.quantized_peers import _leave_inference_mode

    layer = torch.nn.Linear(3, 2)
    _leave_inference_mode(layer)
    with torch.inference_mode():
        out = layer(torch.ones(1, 3))
    assert not out.is_inference() and not out.requires_grad
