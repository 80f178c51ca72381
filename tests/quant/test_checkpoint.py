"""Checkpoints: bit for bit in a new process, the size known before, and no lie believed."""

import json
import os
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
from labkit.model.folding import fold_map
from labkit.model.tiny import tiny_config, tiny_model
from labkit.quant import Calibration, Recipe, quantize_model
from labkit.quant.checkpoint import load, predict_file_bytes, read_header, save, warn_if_larger

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "vocab_size": 128}
TOKENS = torch.arange(1, 33).view(2, 16)
pytestmark = pytest.mark.filterwarnings("ignore:.*no packed kernel")


def quantized(recipe="int4", method="rtn", **overrides):
    model = tiny_model(**(SIZES | overrides))
    calibration = None if method == "rtn" else Calibration([row.tolist() for row in TOKENS] * 4)
    return model, quantize_model(model, recipe, method, calibration, folds=fold_map(model))


def skeleton(**overrides):
    model = Decoder(tiny_config(**(SIZES | overrides)))
    return model.eval().requires_grad_(False)


NEW_PROCESS = """
import sys, torch
from labkit.model.decoder import Decoder
from labkit.model.tiny import tiny_config
from labkit.quant.checkpoint import load
torch.manual_seed(99)
model = Decoder(tiny_config(hidden_size=64, head_dim=16, intermediate_size=128, vocab_size=128, tie_embeddings=True)).eval()
with torch.inference_mode():
    logits = load(sys.argv[1], model)(torch.arange(1, 33).view(2, 16))
torch.save(logits, sys.argv[2])
"""


def test_a_new_process_gives_the_same_bits(tmp_path):
    model, _ = quantized("int4", tie_embeddings=True)
    save(model, tmp_path / "model.safetensors")
    with torch.inference_mode():
        expected = model(TOKENS)
    run = [sys.executable, "-c", NEW_PROCESS, str(tmp_path / "model.safetensors"), str(tmp_path / "logits.pt")]
    subprocess.run(run, check=True)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


@pytest.mark.parametrize(
    "recipe, method",
    [
        ("int8", "rtn"), ("int4_g64_zp", "gptq"), ("int4_g64_zp", "awq+gptq+clip"), ("int3_g64_zp", "rtn"), ("fp8_e4m3", "rtn"),
        ("nvfp4", "rtn"), ("int4_channel", "clip"), ("int4_g32_sym", "rtn"), ("int2_g32_zp", "rtn"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tied", [True, False])
def test_every_format_comes_back_equal(tmp_path, recipe, method, tied):
    model, report = quantized(recipe, method, tie_embeddings=tied)
    save(model, tmp_path / "m.safetensors")
    again = load(tmp_path / "m.safetensors", skeleton(tie_embeddings=tied))
    assert torch.equal(again(TOKENS), model(TOKENS))
    stored = sum(t.numel() * t.element_size() for t in load_file(tmp_path / "m.safetensors").values())
    assert stored == predict_file_bytes(report) == read_header(tmp_path / "m.safetensors")["tensor_bytes"]


def test_act_order_on_and_off_and_eighty_six_groups(tmp_path):
    for act_order in (True, False):
        from labkit.quant import Method

        model = tiny_model(**(SIZES | {"intermediate_size": 86 * 32, "num_layers": 1}))
        sequences = Calibration([row.tolist() for row in TOKENS])
        quantize_model(model, "int4_g32_zp", Method("gptq", act_order=act_order), sequences, kernel="plain")
        save(model, tmp_path / "m.safetensors")
        again = load(tmp_path / "m.safetensors", skeleton(intermediate_size=86 * 32, num_layers=1))
        assert again.layers[0].mlp.down.weight.quantized().scale.shape == (64, 86)
        assert torch.equal(again(TOKENS), model(TOKENS))


def test_stored_bytes_are_packed(tmp_path):
    model, _ = quantized("int4_g64_zp")
    save(model, tmp_path / "m.safetensors")
    tensors = load_file(tmp_path / "m.safetensors")
    codes = tensors["layers.0.mlp.down.weight.codes"]
    assert codes.numel() == 64 * 128 // 2


def test_mixed_recipes_biases_and_unquantised_layers_come_back(tmp_path):
    recipe = Recipe("mixed", "int8_channel", "fp32", "fp32", overrides={"layers.0.*": "fp32", "*.mlp.down": "bf16"})
    model, _ = quantized(recipe, architecture="qwen2", tie_embeddings=True)
    save(model, tmp_path / "m.safetensors", about={"name": "tiny"})
    again = load(tmp_path / "m.safetensors", skeleton(architecture="qwen2", tie_embeddings=True))
    assert torch.equal(again(TOKENS), model(TOKENS))
    assert again.head.weight is again.embed_tokens.weight or torch.equal(again.head.weight, again.embed_tokens.weight)
    assert read_header(tmp_path / "m.safetensors")["about"] == {"name": "tiny"}


def test_w8a8_comes_back_as_w8a8(tmp_path):
    model, _ = quantized(Recipe("w8a8", activations="int8_token"))
    save(model, tmp_path / "m.safetensors")
    assert torch.equal(load(tmp_path / "m.safetensors", skeleton())(TOKENS), model(TOKENS))


def test_transformers_models_come_back_too(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=1, n_head=2)

    def build():
        return transformers.GPT2LMHeadModel(config).eval()

    model = build()
    quantize_model(model, "int8_channel")
    save(model, tmp_path / "m.safetensors")
    again = load(tmp_path / "m.safetensors", build())
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def rewrite(path, change_header=None, change_tensors=None):
    with safe_open(str(path), "pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    if change_tensors:
        change_tensors(tensors)
    if change_header:
        change_header(metadata)
    save_file(tensors, path, metadata)


def layers_changed(change):
    def apply(metadata):
        layers = json.loads(metadata["layers"])
        change(layers)
        metadata["layers"] = json.dumps(layers)

    return apply


LIES = {
    "another version": (lambda m: m.update(version="2"), None, "reads version 1"),
    "no version": (lambda m: m.pop("version"), None, "lacks 'version'"),
    "no layers": (lambda m: m.pop("layers"), None, "lacks 'layers'"),
    "not a checkpoint": (lambda m: m.pop("labkit"), None, "not a quantised checkpoint"),
    "broken json": (lambda m: m.update(layers="{"), None, "not JSON"),
    "a field missing": (layers_changed(lambda x: x["head"].pop("shape")), None, "says nothing of 'shape' for head"),
    "another format": (
        layers_changed(lambda x: x["layers.0.mlp.down"].update(format="int3_g64_zp")),
        None,
        "lies about itself",
    ),
    "a format of equal size": (
        layers_changed(lambda x: x["layers.0.mlp.down"].update(format="int4_g32_min")),
        None,
        "lies about itself",
    ),
    "an unknown format": (layers_changed(lambda x: x["head"].update(format="int4_magic")), None, "no number format"),
    "another shape": (
        layers_changed(lambda x: x["head"].update(shape=[64, 128])),
        None,
        "lies about itself|another architecture",
    ),
    "a kind of layer": (layers_changed(lambda x: x["head"].update(kind="conv")), None, "kind 'conv' of head"),
    "an embedding that is none": (layers_changed(lambda x: x["head"].update(kind="embedding")), None, "another architecture"),
    "experts that are none": (layers_changed(lambda x: x["layers.0.mlp.down"].update(kind="experts")), None, "no tensor of this model"),
    "no shape": (layers_changed(lambda x: x["head"].update(shape=[64.0, 128.0])), None, "shape \\[64.0, 128.0\\]"),
    "a dtype": (layers_changed(lambda x: x["embed_tokens"].update(dtype="load")), None, "dtype 'load' of embed_tokens"),
    "a scale": (layers_changed(lambda x: x["embed_tokens"].update(scale=float("nan"))), None, "scale nan of embed_tokens"),
    "whom it shares with": (layers_changed(lambda x: x["head"].update(shared_with=[1])), None, "shared_with \\[1\\]"),
    "a bias": (layers_changed(lambda x: x["head"].update(bias=True)), None, "agree on a bias of head"),
    "a layer of text": (layers_changed(lambda x: x.update(head="x")), None, "says nothing of 'kind' for head"),
    "a list of layers": (lambda m: m.update(layers="[]"), None, "lists no layers by name"),
    "an alias of nothing": (
        layers_changed(lambda x: x.update({"norm.weight": {"kind": "alias", "shared_with": "norm.forward"}})),
        None,
        "no tensor of this model",
    ),
    "an alias of itself": (
        layers_changed(lambda x: x.update({"norm.weight": {"kind": "alias", "shared_with": "norm.weight"}})),
        None,
        "lies about itself",
    ),
    "a version that is true": (lambda m: m.update(version="true"), None, "reads version 1"),
    "changed codes": (None, lambda t: t["layers.0.mlp.down.weight.codes"].add_(1), "checksum"),
    "swapped scales": (None, lambda t: t["layers.0.mlp.down.weight.scale"].mul_(2), "checksum"),
    "a tensor gone": (None, lambda t: t.pop("layers.0.mlp.down.weight.scale"), "checksum"),
    "a tensor more": (None, lambda t: t.update(extra=torch.ones(3)), "checksum"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused(tmp_path, lie):
    header, tensors, match = LIES[lie]
    model, _ = quantized("int4")
    path = tmp_path / "m.safetensors"
    save(model, path)
    rewrite(path, header, tensors)
    with pytest.raises(BadRequest, match=match):
        load(path, skeleton())


QKV = "layers.0.attention.qkv.weight"
SIGNED_LIES = {  # whose header and checksum were made to agree with them
    "turned codes": (lambda t: t.update({f"{QKV}.codes": t[f"{QKV}.codes"].T.contiguous()}), "lies about itself"),
    "flat codes": (lambda t: t.update({f"{QKV}.codes": t[f"{QKV}.codes"].flatten()}), "lies about itself"),
    "turned scales": (lambda t: t.update({f"{QKV}.scale": t[f"{QKV}.scale"].T.contiguous()}), "lies about itself"),
    "a scale of NaN": (lambda t: t[f"{QKV}.scale"].fill_(float("nan")), "NaN or infinity for layers.0.attention.qkv"),
    "a norm of NaN": (lambda t: t["norm.weight"].fill_(float("nan")), "NaN or infinity for norm.weight"),
    "a norm of whole numbers": (lambda t: t.update({"norm.weight": t["norm.weight"].int()}), "does not fit"),
    "no norm": (lambda t: t.pop("norm.weight"), "holds nothing for norm.weight"),
}


@pytest.mark.parametrize("lie", SIGNED_LIES)
def test_a_file_whose_checksum_agrees_with_its_lie_is_refused(tmp_path, lie):
    from labkit.quant.header import digest

    change, match = SIGNED_LIES[lie]
    save(quantized("int4")[0], tmp_path / "m.safetensors")
    tensors = load_file(tmp_path / "m.safetensors")
    change(tensors)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    rewrite(tmp_path / "m.safetensors", lambda m: m.update(sha256=digest(tensors), tensor_bytes=str(size)),
            lambda stored: (stored.clear(), stored.update(tensors)))  # fmt: skip
    with pytest.raises(BadRequest, match=match):
        load(tmp_path / "m.safetensors", skeleton())


def test_the_same_rewriting_without_a_lie_is_accepted(tmp_path):
    model, _ = quantized("int4")
    save(model, tmp_path / "m.safetensors")
    rewrite(tmp_path / "m.safetensors")
    assert torch.equal(load(tmp_path / "m.safetensors", skeleton())(TOKENS), model(TOKENS))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path, share):
    model, _ = quantized("int4")
    path = tmp_path / "m.safetensors"
    save(model, path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(BadRequest, match="cannot be read"):
        load(path, skeleton())
    with pytest.raises(BadRequest, match="cannot be read"):
        read_header(tmp_path / "nowhere.safetensors")


def test_another_architecture_is_refused(tmp_path):
    model, _ = quantized("int4")
    save(model, tmp_path / "m.safetensors")
    for other in ({"num_layers": 1}, {"hidden_size": 128}, {"num_layers": 3}):
        with pytest.raises(BadRequest, match="another architecture"):
            with torch.device("meta"):
                other_model = skeleton(**other)
            load(tmp_path / "m.safetensors", other_model)
    for held, filled in (({}, {"num_layers": 3}), ({}, {"architecture": "qwen2"}), ({"architecture": "qwen2"}, {}),
                         ({}, {"architecture": "qwen3"}), ({}, {"architecture": "gemma3_text"})):  # fmt: skip
        save(quantized("int4", **held)[0], tmp_path / "m.safetensors")
        with pytest.raises(BadRequest, match="another architecture"):
            load(tmp_path / "m.safetensors", skeleton(**filled))  # whose weights are there: nothing of them may stay


@pytest.mark.skipif(os.name == "nt", reason="modes")
def test_a_file_can_be_read_by_whom_any_new_file_can(tmp_path):
    save(quantized("int8")[0], tmp_path / "m.safetensors")
    (tmp_path / "plain").touch()
    assert (tmp_path / "m.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_saving_what_is_not_quantised_is_refused(tmp_path):
    with pytest.raises(BadRequest, match="no quantised layer"):
        save(tiny_model(), tmp_path / "m.safetensors")


def test_a_file_that_would_be_larger_is_said_before(recwarn):
    network = tiny_model(**(SIZES | {"tie_embeddings": True, "vocab_size": 4096}), dtype=torch.bfloat16)
    report = quantize_model(network, Recipe("r", "bf16", "int8_channel", "int8_g32_sym"))
    warn_if_larger(report)  # head 8 bits and embedding 8.5, against 16 shared
    assert any("stay shared" in str(w.message) for w in recwarn.list)
    recwarn.clear()
    _, report = quantized("int4", tie_embeddings=True)
    warn_if_larger(report)
    assert not any("stay shared" in str(w.message) for w in recwarn.list)


def test_the_header_reads_without_labkit(tmp_path):
    model, _ = quantized("int4")
    save(model, tmp_path / "m.safetensors")
    with safe_open(str(tmp_path / "m.safetensors"), "pt") as file:
        layers = json.loads(file.metadata()["layers"])
    entry = layers["layers.0.attention.qkv"]
    assert entry["format"] in ("int4_g32_min", "int4_g32_mid") and entry["shape"] == [128, 64]
    assert get_format(entry["format"]).nbytes(tuple(entry["shape"])) == 128 * 32 + 128 * 2 * 4


def test_an_unquantised_buffer_or_parameter_is_kept(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.gain = nn.Parameter(torch.rand(64))
            self.register_buffer("mean", torch.rand(64))

        def forward(self, x):
            return self.linear((x - self.mean) * self.gain)

    net = Net()
    quantize_model(net, "int8")
    save(net, tmp_path / "m.safetensors")
    x = torch.randn(3, 64)
    assert torch.equal(load(tmp_path / "m.safetensors", Net())(x), net(x))


def test_a_write_that_fails_leaves_nothing_and_what_was_there(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    path = tmp_path / "q.safetensors"
    save(quantized()[0], path)
    before = path.read_bytes()

    def full(tensors, part, metadata):
        part.write_bytes(b"half")
        raise SafetensorError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="q.safetensors could not be written: no space left"):
        save(quantized()[0], path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["q.safetensors"]


def test_a_place_too_small_is_refused_before(tmp_path):
    from labkit.quant.header import check_output

    check_output(tmp_path / "new" / "q.safetensors", 1000)
    with pytest.raises(BadRequest, match="choose another place"):
        check_output(tmp_path / "q.safetensors", 1 << 60)


def test_a_quantised_file_is_a_model_again(tmp_path):
    from labkit.model.load import load_model
    from labkit.model.native_decoder import why_not
    from labkit.model.quantized_file import load_quantized

    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                      intermediate_size=128, vocab_size=128)  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "original")
    model = load_model(tmp_path / "original")
    quantize_model(model, "int8")
    save(model, tmp_path / "small.safetensors", about={"model": str(tmp_path / "original")})
    again = load_model(tmp_path / "small.safetensors")
    assert torch.equal(again(TOKENS), model(TOKENS)) and "small.safetensors" in again.name
    fast = load_quantized(tmp_path / "small.safetensors", kernels="auto")
    close = (fast(TOKENS).softmax(-1) - model(TOKENS).softmax(-1)).abs().max()
    assert close < 0.01 and (why_not(fast.config) is not None or type(fast).__name__ == "NativeDecoder")
    save(model, tmp_path / "orphan.safetensors")
    with pytest.raises(BadRequest, match="does not say which model"):
        load_quantized(tmp_path / "orphan.safetensors")
    save(model, tmp_path / "moved.safetensors", about={"model": str(tmp_path / "gone")})
    with pytest.raises(BadRequest, match="moved.safetensors was made from .*gone"):
        load_model(tmp_path / "moved.safetensors")


@pytest.mark.skipif(os.name == "nt", reason="kill -9")
def test_kill_9_while_writing_leaves_the_name_free_and_the_next_run_whole(tmp_path):
    code = f"""
import time, safetensors.torch
def half(tensors, part, metadata):
    open(part, "wb").write(b"half"); print("writing", flush=True); time.sleep(60)
safetensors.torch.save_file = half
from labkit.model.tiny import tiny_model
from labkit.quant import quantize_model
from labkit.quant.checkpoint import save
model = tiny_model(hidden_size=64, head_dim=16, intermediate_size=128, vocab_size=128)
quantize_model(model, "int8"); save(model, {str(tmp_path / "q.safetensors")!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    process.kill()
    process.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["q.safetensors.part"]
    model = quantized()[0]
    save(model, tmp_path / "q.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["q.safetensors"]
    assert torch.equal(load(tmp_path / "q.safetensors", skeleton())(TOKENS), model(TOKENS))
