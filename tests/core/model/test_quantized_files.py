"""Quantized checkpoints give the same bits in another process and have the predicted size."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from labkit.errors import BadRequest
from labkit.formats import get_format
from labkit.model.decoder import Decoder
from labkit.model.files.quantized import (
    WEIGHTS,
    check_folder,
    is_quantized,
    load_weights,
    read_header,
    save_quantized,
    save_weights,
)
from labkit.model.folding import fold_map
from labkit.model.load import load
from labkit.model.tiny import tiny_config, tiny_model
from labkit.model.tokenizer import Tokenizer
from labkit.quant import Calibration, Method, Recipe, quantize_model
from labkit.quant.linear import QuantizedLinear

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "vocab_size": 128}
TOKENS = torch.arange(1, 33).view(2, 16)
pytestmark = pytest.mark.filterwarnings("ignore:.*no packed kernel")


def quantized(recipe="int4", method="rtn", **overrides):
    model = tiny_model(**(SIZES | overrides))
    calibration = None if method == "rtn" else Calibration([row.tolist() for row in TOKENS] * 4)
    return model, quantize_model(model, recipe, method, calibration, folds=fold_map(model))


def skeleton(**overrides):
    with torch.device("meta"):
        model = Decoder(tiny_config(**(SIZES | overrides)))
    return model.eval().requires_grad_(False)


def saved(tmp_path, *args, **kwargs):
    """Return a quantized model and the file of its weights."""
    model, _ = quantized(*args, **kwargs)
    save_weights(model, tmp_path / WEIGHTS)
    return model, tmp_path / WEIGHTS


NEW_PROCESS = """
import sys, torch
from labkit.model.load import load
model = load(sys.argv[1])
with torch.inference_mode():
    torch.save((model(torch.arange(1, 33).view(2, 16)), model.tokenizer.chat("hi")), sys.argv[2])
"""


def test_a_folder_that_was_moved_gives_the_same_bits_in_a_new_process(tmp_path, train_byte_level):
    model, report = quantized("int4", tie_embeddings=True)
    template = "{{ messages[0].content }}!"
    model.tokenizer = Tokenizer(train_byte_level(), chat_template=template)
    model.revision = "abc"
    assert save_quantized(model, tmp_path / "small", report) > report.nbytes
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "small", tmp_path / "elsewhere" / "moved")
    folder = tmp_path / "elsewhere" / "moved"
    code = [sys.executable, "-c", NEW_PROCESS, str(folder), str(tmp_path / "out.pt")]
    subprocess.run(code, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    logits, chat = torch.load(tmp_path / "out.pt")
    assert torch.equal(logits, model(TOKENS)) and chat == model.tokenizer.chat("hi")
    again = load(folder)
    assert again.name == f"{model.name} (moved)" and again.revision == "abc"
    assert again.head.weight is again.embed_tokens.weight
    for path in folder.iterdir():  # no path of the machine that wrote it
        assert str(tmp_path).encode() not in path.read_bytes()


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3_text"])
def test_every_architecture_is_read_from_its_folder(tmp_path, architecture):
    model = tiny_model(architecture)
    report = quantize_model(model, "int8")
    save_quantized(model, tmp_path / "small", report)
    again = load(tmp_path / "small")
    assert again.config == model.config and torch.equal(again(TOKENS), model(TOKENS))
    assert not any(p.requires_grad for p in again.parameters()) and not again.training
    assert load(tmp_path / "small", dtype=torch.bfloat16).norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "recipe, method",
    [
        ("int8", "rtn"),
        ("int4_g64_zp", "gptq"),
        ("int4_g64_zp", "awq+gptq+clip"),
        ("int3_g64_zp", "rtn"),
        ("fp8_e4m3", "rtn"),
        ("nvfp4", "rtn"),
        ("int4_channel", "clip"),
        ("int4_g32_sym", "rtn"),
        ("int2_g32_zp", "rtn"),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_every_format_is_read_back_equal_and_has_the_predicted_bytes(
    tmp_path, recipe, method, tied
):
    model, report = quantized(recipe, method, tie_embeddings=tied)
    save_weights(model, tmp_path / WEIGHTS)
    again = skeleton(tie_embeddings=tied)
    load_weights(tmp_path / WEIGHTS, again)
    assert torch.equal(again(TOKENS), model(TOKENS))
    assert sum(t.nbytes for t in load_file(tmp_path / WEIGHTS).values()) == report.nbytes


def test_act_order_on_and_off_and_eighty_six_groups(tmp_path):
    sizes = {"intermediate_size": 86 * 32, "num_layers": 1}
    for act_order in (True, False):
        model = tiny_model(**(SIZES | sizes))
        sequences = Calibration([row.tolist() for row in TOKENS])
        quantize_model(
            model, "int4_g32_zp", Method("gptq", act_order=act_order), sequences, kernel="plain"
        )
        save_weights(model, tmp_path / WEIGHTS)
        again = skeleton(**sizes)
        load_weights(tmp_path / WEIGHTS, again)
        assert again.layers[0].mlp.down.weight.quantized().scale.shape == (64, 86)
        assert torch.equal(again(TOKENS), model(TOKENS))


def test_stored_bytes_are_packed(tmp_path):
    _, path = saved(tmp_path, "int4_g64_zp")
    assert load_file(path)["layers.0.mlp.down.weight.codes"].numel() == 64 * 128 // 2


@pytest.mark.parametrize("head", ["fp32", "int8_channel"])
def test_mixed_recipes_biases_and_unquantized_layers_are_read_back(tmp_path, head):
    kept = {"layers.0.*": "fp32", "*.mlp.down": "bf16"}
    recipe = Recipe("mixed", "int8_channel", head, "fp32", overrides=kept)
    model, path = saved(tmp_path, recipe, architecture="qwen2", tie_embeddings=True)
    again = skeleton(architecture="qwen2", tie_embeddings=True)
    load_weights(path, again)
    assert torch.equal(again(TOKENS), model(TOKENS))
    assert (again.head.weight is again.embed_tokens.weight) == (head == "fp32")


def test_w8a8_is_read_back_as_w8a8_or_plain(tmp_path):
    model, path = saved(tmp_path, Recipe("w8a8", activations="int8_token"))
    again = skeleton()
    load_weights(path, again)
    assert torch.equal(again(TOKENS), model(TOKENS))
    model, path = saved(tmp_path, "int8")
    again = skeleton()
    load_weights(path, again, kernels="plain")
    names = {type(m.weight).__name__ for m in again.modules() if isinstance(m, QuantizedLinear)}
    assert names == {"Plain"}
    torch.testing.assert_close(again(TOKENS), model(TOKENS), rtol=0.1, atol=0.1)


def test_transformers_models_are_read_back(tmp_path):
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=1, n_head=2)
    mixtral = transformers.MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    for kind, config in (
        (transformers.GPT2LMHeadModel, gpt2),
        (transformers.MixtralForCausalLM, mixtral),
    ):
        model, again = kind(config).eval(), kind(config).eval()
        quantize_model(model, "int8_channel")
        save_weights(model, tmp_path / WEIGHTS)
        load_weights(tmp_path / WEIGHTS, again)
        with torch.no_grad():
            assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_unquantized_buffers_and_parameters_are_stored(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.gain = nn.Parameter(torch.rand(64))
            self.register_buffer("mean", torch.rand(64))

        def forward(self, x):
            return self.linear((x - self.mean) * self.gain)

    net, again = Net(), Net()
    quantize_model(net, "int8")
    save_weights(net, tmp_path / WEIGHTS)
    load_weights(tmp_path / WEIGHTS, again)
    x = torch.randn(3, 64)
    assert torch.equal(again(x), net(x))


def rewrite(path, change_header=None, change_tensors=None):
    with safe_open(str(path), "pt") as file:
        header = dict(file.metadata())
    tensors = load_file(path)
    (change_tensors or (lambda tensors: None))(tensors)
    (change_header or (lambda header: None))(header)
    save_file(tensors, path, header)


def other_format(header):
    header["formats"] = header["formats"].replace("int4_g32_m", "int4_g32_z")


DAMAGE = {
    "another version": (lambda h: h.update(version="3"), None, "version 2"),
    "no version": (lambda h: h.pop("version"), None, "version 2"),
    "not a checkpoint": (lambda h: h.pop("labkit"), None, "not a quantized checkpoint"),
    "no formats": (lambda h: h.pop("formats"), None, "cannot be read"),
    "broken json": (lambda h: h.update(formats="{"), None, "cannot be read"),
    "another format": (other_format, None, "checksum"),
    "changed codes": (None, lambda t: t["layers.0.mlp.down.weight.codes"].add_(1), "checksum"),
    "changed norm": (None, lambda t: t["norm.weight"].mul_(2), "checksum"),
    "a tensor gone": (None, lambda t: t.pop("layers.0.mlp.down.weight.scale"), "checksum"),
    "a tensor more": (None, lambda t: t.update(extra=torch.ones(3)), "checksum"),
    "nothing": (None, None, None),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_raises_an_error(tmp_path, damage):
    change_header, change_tensors, match = DAMAGE[damage]
    model, path = saved(tmp_path)
    rewrite(path, change_header, change_tensors)
    again = skeleton()
    if match is None:
        load_weights(path, again)
        assert torch.equal(again(TOKENS), model(TOKENS))
        return
    with pytest.raises(BadRequest, match=match):
        load_weights(path, again)
    assert isinstance(again.head, nn.Linear)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_raises_an_error(tmp_path, share):
    _, path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(BadRequest, match="cannot be read"):
        load_weights(path, skeleton())
    with pytest.raises(BadRequest, match="cannot be read"):
        read_header(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize(
    "written, filled, name",
    [
        ({}, {"num_layers": 1}, "layers.1"),
        ({}, {"num_layers": 3}, "layers.2"),
        ({}, {"hidden_size": 128}, "embed_tokens.weight"),
        ({}, {"architecture": "qwen2"}, "qkv.bias"),
        ({"architecture": "qwen2"}, {}, "qkv.bias"),
        ({}, {"architecture": "qwen3"}, "k_norm"),
        ({}, {"architecture": "gemma3_text"}, "k_norm"),
    ],
)
def test_another_architecture_raises_an_error_with_the_first_difference(
    tmp_path, written, filled, name
):
    _, path = saved(tmp_path, **written)
    with pytest.raises(BadRequest, match=f"{name}.*another architecture"):
        load_weights(path, skeleton(**filled))


@pytest.mark.skipif(os.name == "nt", reason="modes")
def test_a_file_has_the_permissions_of_a_new_file(tmp_path):
    _, path = saved(tmp_path)
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_saving_a_plain_model_raises_an_error(tmp_path):
    with pytest.raises(BadRequest, match="no quantized layer"):
        save_weights(tiny_model(), tmp_path / WEIGHTS)


def test_the_header_can_be_read_without_labkit(tmp_path):
    model, report = quantized("int4", "clip")
    save_quantized(model, tmp_path / "small", report)
    with safe_open(str(tmp_path / "small" / WEIGHTS), "pt") as file:
        header = file.metadata()
    assert (header["version"], header["method"], header["model"]) == ("2", "clip", model.name)
    assert json.loads(header["recipe"])["blocks"] == "int4_g32_min"
    entry = json.loads(header["formats"])["layers.0.attention.qkv.weight"]
    assert entry["format"] in ("int4_g32_min", "int4_g32_mid") and entry["shape"] == [128, 64]
    assert get_format(entry["format"]).nbytes(tuple(entry["shape"])) == 128 * 32 + 128 * 2 * 4
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "labkit"


def test_only_an_unchanged_folder_that_labkit_wrote_is_replaced(tmp_path):
    model, report = quantized()
    for _ in range(2):
        save_quantized(model, tmp_path / "small", report)
    assert is_quantized(tmp_path / "small") and not is_quantized(tmp_path)
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    (tmp_path / "small" / "notes.txt").write_text("mine")
    for name in ("notes", "full", "small"):
        with pytest.raises(BadRequest, match=f"{name} exists and is not a checkpoint"):
            save_quantized(model, tmp_path / name, report)
    assert (tmp_path / "small" / "notes.txt").read_text() == "mine"
    with pytest.raises(BadRequest, match="name of a folder, such as small"):
        check_folder(tmp_path / "small.safetensors")
    check_folder(tmp_path / "new" / "small", 1000)
    with pytest.raises(BadRequest, match="choose another place"):
        check_folder(tmp_path / "new", 1 << 60)


def test_a_failed_write_leaves_the_old_files_and_no_new_ones(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    model, report = quantized()
    save_quantized(model, tmp_path / "small", report)
    before = (tmp_path / "small" / WEIGHTS).read_bytes()

    def full(tensors, part, metadata):
        part.write_bytes(b"half")
        raise SafetensorError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="could not be written: no space left"):
        save_quantized(model, tmp_path / "small", report)
    assert (tmp_path / "small" / WEIGHTS).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


@pytest.mark.skipif(os.name == "nt", reason="kill -9")
def test_after_a_kill_while_writing_the_next_run_succeeds(tmp_path):
    code = f"""
import time, safetensors.torch
def half(tensors, part, metadata):
    open(part, "wb").write(b"half"); print("writing", flush=True); time.sleep(60)
safetensors.torch.save_file = half
from labkit.model.files.quantized import save_quantized
from labkit.model.tiny import tiny_model
from labkit.quant import quantize_model
model = tiny_model(hidden_size=64, head_dim=16, intermediate_size=128, vocab_size=128)
save_quantized(model, {str(tmp_path / "small")!r}, quantize_model(model, "int8"))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    process.kill()
    process.wait()
    assert not (tmp_path / "small").exists()
    model, report = quantized()
    save_quantized(model, tmp_path / "small", report)
    assert torch.equal(load(tmp_path / "small")(TOKENS), model(TOKENS))
