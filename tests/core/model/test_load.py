"""Load checkpoints from folders and files; damaged ones raise an error."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from labkit.errors import BadRequest
from labkit.lab.stack.open import load_model
from labkit.model.files.convert import convert_gguf, smallest_exact
from labkit.model.files.names import to_hf_state_dict
from labkit.model.load import check_device, load_folder, load_gguf
from labkit.model.tiny import tiny_model


def write_folder(folder, model, shards=1, **settings):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_hf() | settings))
    state = {name: tensor.contiguous().clone() for name, tensor in to_hf_state_dict(model).items()}
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    names = {}
    for i in range(shards):
        part = dict(list(state.items())[i::shards])
        save_file(part, folder / f"model-{i}.safetensors")
        names |= {name: f"model-{i}.safetensors" for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_folder_returns_the_same_model(tmp_path, architecture, shards):
    model = tiny_model(architecture, tie_embeddings=shards == 3, num_heads=6, num_kv_heads=3)
    back = load_model(write_folder(tmp_path / "m", model, shards))
    assert (
        same(model, back) and back.config == model.config and back.name == "m" and not back.training
    )
    assert not any(p.requires_grad for p in back.parameters())
    assert (back.head.weight is back.embed_tokens.weight) == model.config.tie_embeddings
    half = load_folder(tmp_path / "m", dtype=torch.bfloat16)
    assert same(half, model.to(torch.bfloat16))


def test_a_folder_written_by_transformers_is_read(tmp_path, twin):
    model = tiny_model("qwen3", tie_embeddings=True)
    twin(model).save_pretrained(tmp_path / "m")
    assert same(load_folder(tmp_path / "m"), model)


def test_a_second_copy_of_a_tied_head_is_not_used(tmp_path):
    model = tiny_model(tie_embeddings=True)
    folder = write_folder(tmp_path / "m", model)
    state = load_file(folder / "model.safetensors")
    save_file(
        state | {"lm_head.weight": state["model.embed_tokens.weight"] + 1},
        folder / "model.safetensors",
    )
    assert same(load_folder(folder), model)


def test_end_tokens_come_from_the_generation_configuration(tmp_path):
    folder = write_folder(tmp_path / "m", tiny_model())
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 7], "temperature": 0.2})
    )
    assert load_folder(folder).config.eos_ids == (2, 7)


def test_damaged_checkpoints_raise_an_error_with_the_reason(tmp_path):
    model = tiny_model()
    folder = write_folder(tmp_path / "m", model)
    state = load_file(folder / "model.safetensors")
    path, name = folder / "model.safetensors", "model.layers.1.self_attn.k_proj.weight"

    save_file({k: v for k, v in state.items() if k != name}, path)
    with pytest.raises(BadRequest, match=f"lacks 1 of the 21 tensors.*{name}"):
        load_folder(folder)
    save_file(state | {name: state[name][:-1].clone()}, path)
    with pytest.raises(BadRequest, match=rf"{name} with shape \[15, 32\].*\[16, 32\]"):
        load_folder(folder)
    save_file(state | {"model.layers.1.self_attn.q_proj.bias": torch.zeros(32)}, path)
    with pytest.raises(
        BadRequest, match=r"q_proj\.bias, which a llama with its config does not have"
    ):
        load_folder(folder)
    save_file(state, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadRequest, match="not a complete safetensors file"):
        load_folder(folder)
    path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(BadRequest, match=r"lacks model\.safetensors.*safetensors only"):
        load_folder(folder)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {name: "../x.safetensors"}})
    )
    with pytest.raises(BadRequest, match="outside its folder"):
        load_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(BadRequest, match=r"no config\.json"):
        load_folder(folder)


def test_the_error_for_an_unknown_name_lists_the_known_ones():
    with pytest.raises(BadRequest, match=r"'no-such-model'.*smollm2-135m-instruct.*owner/name"):
        load_model("no-such-model")


def test_an_unreachable_hub_raises_a_clear_error():
    with pytest.raises(
        BadRequest, match=r"owner/model could not be fetched from the hub .*network"
    ):
        load_model("owner/model")


@pytest.fixture
def small_gguf(tmp_path, write_gguf, train_byte_level):
    backend = train_byte_level()
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    merges = [" ".join(m) for m in json.loads(backend.to_str())["model"]["merges"]]
    tokenizer = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "merges": merges,
        "chat_template": "C",
    }
    tokenizer["token_type"] = [
        3 if i in backend.get_added_tokens_decoder() else 1 for i in range(len(tokens))
    ]
    model = tiny_model(tie_embeddings=True, vocab_size=len(tokens), intermediate_size=64)
    return write_gguf(tmp_path / "small.gguf", model, "Q4_1", tokenizer=tokenizer)


def test_a_converted_file_equals_the_file(tmp_path, small_gguf):
    folder = convert_gguf(small_gguf, tmp_path / "out")
    direct, back = load_gguf(small_gguf), load_folder(folder)
    assert same(direct, back) and direct.config == back.config
    assert back.source["grid"] == "int4_g32_min" and len(back.source["source_sha256"]) == 64
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}
    for text in ("def f(x): return x  # 123", "日本 🙂"):
        assert direct.tokenizer.encode(text) == back.tokenizer.encode(text)
    assert back.tokenizer.chat_template == "C" and back.tokenizer.add_bos is False
    assert back.tokenizer.eos_ids == direct.tokenizer.eos_ids == (2,)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "small.gguf"]


def test_transformers_reads_the_converted_folder(tmp_path, small_gguf):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = convert_gguf(small_gguf, tmp_path / "out")
    ours, theirs = load_folder(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.tensor([ours.tokenizer.encode("def add(a, b)")])
    with torch.inference_mode():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
    assert AutoTokenizer.from_pretrained(folder).encode("def add(a, b)") == tokens[0].tolist()


def test_a_failed_conversion_leaves_no_files(tmp_path, small_gguf, monkeypatch):
    from labkit.model.files import convert

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(convert, "_write", fail)
    with pytest.raises(OSError, match="disk full"):
        convert_gguf(small_gguf, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["small.gguf"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(BadRequest, match="is not empty"):
        convert_gguf(small_gguf, tmp_path / "full")


def test_smallest_exact_dtype():
    assert smallest_exact({"a": torch.tensor([1.0, 0.5])}) == torch.float16
    assert smallest_exact({"a": torch.tensor([1.0, 1e30]).bfloat16().float()}) == torch.bfloat16
    assert smallest_exact({"a": torch.tensor([1.0, 0.1])}) == torch.float32


@pytest.mark.parametrize("device", ["foo", "cuda:99x"])
def test_an_unknown_device_raises_an_error(device):
    with pytest.raises(BadRequest, match="Device"):
        check_device(device)


def test_cuda_raises_an_error_if_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadRequest, match="cuda"):
        check_device("cuda")
    check_device("cpu")
