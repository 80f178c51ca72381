"""Read GGUF files in every block type; unsupported files raise an error."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from labkit.errors import BadRequest
from labkit.model.config import ModelConfig
from labkit.model.files.gguf import TENSOR_TYPES, GGUFFile
from labkit.model.files.names import to_hf_state_dict
from labkit.model.load import load_gguf
from labkit.model.rope import RopeConfig
from labkit.model.tiny import tiny_model

VOCABULARY = {
    "model": "gpt2",
    "pre": "smollm",
    "tokens": [f"t{i}" for i in range(96)],
    "merges": ["t 1"],
}
VOCABULARY["tokens"][:3] = ["t", "1", "t1"]
WRITABLE = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_float32_file_returns_the_same_weights_and_configuration(
    tmp_path, write_gguf, architecture, tied
):
    model = tiny_model(architecture, tie_embeddings=tied, num_heads=6, num_kv_heads=3)
    back = load_gguf(write_gguf(tmp_path / "m.gguf", model, tokenizer=VOCABULARY))
    for (name, want), (_, got) in zip(
        to_hf_state_dict(model).items(), to_hf_state_dict(back).items()
    ):
        assert torch.equal(got, want), name
    assert (back.head.weight is back.embed_tokens.weight) == tied
    expected = model.config
    if architecture == "mistral":  # llama.cpp does not tell them apart
        expected = ModelConfig(**{**vars(expected), "architecture": "llama"})
    assert back.config == expected


@pytest.mark.parametrize("type", WRITABLE)
def test_every_block_type_is_read_within_one_step(tmp_path, write_gguf, type):
    model = tiny_model(hidden_size=64, head_dim=16, intermediate_size=96)
    back = load_gguf(write_gguf(tmp_path / "m.gguf", model, type, tokenizer=VOCABULARY))
    for want, got in zip(model.parameters(), back.parameters()):
        steps = {
            "F16": 2048,
            "BF16": 256,
            "Q4_0": 8,
            "Q4_1": 15,
            "Q5_0": 16,
            "Q5_1": 31,
            "Q8_0": 127,
        }[type]
        assert (got - want).abs().max() <= 1.1 * want.abs().max() / steps * (
            2 if type.endswith("_1") else 1
        )
        assert want.dim() == 1 or not torch.equal(got, want)


def test_q4_1_and_q8_0_by_hand(tmp_path):
    """Q4_1: d, m, then byte i has weight i in its low half and weight i + 16 in its high half.

    Q8_0: d, then 32 codes.
    """
    import gguf

    d, m = np.float16(0.1), np.float16(-0.7)
    codes = np.arange(32) % 16
    q4_1 = np.concatenate(
        [np.array([d, m]).view(np.uint8), (codes[:16] | codes[16:][::-1] << 4).astype(np.uint8)]
    )
    q8_0 = np.concatenate(
        [np.array([d]).view(np.uint8), np.arange(-16, 16).astype(np.int8).view(np.uint8)]
    )
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("a", q4_1[None], raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("b", q8_0[None], raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    (
        writer.write_header_to_file(),
        writer.write_kv_data_to_file(),
        writer.write_tensors_to_file(),
        writer.close(),
    )
    file = GGUFFile(tmp_path / "m.gguf")
    want = np.float32(d) * np.concatenate([codes[:16], codes[16:][::-1]]).astype(
        np.float32
    ) + np.float32(m)
    assert file.raw("a")[0].tolist() == want.tolist()
    assert (
        file.raw("b")[0].tolist() == (np.float32(d) * np.arange(-16, 16, dtype=np.float32)).tolist()
    )


@pytest.mark.parametrize("type", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_types_are_read_completely(tmp_path, type):
    import gguf

    kind = gguf.GGMLQuantizationType[type]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(0).integers(
        0, 60, (3, 2 * size), dtype=np.uint8
    )  # small: no infinite float16
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("a", rows, raw_dtype=kind)
    (
        writer.write_header_to_file(),
        writer.write_kv_data_to_file(),
        writer.write_tensors_to_file(),
        writer.close(),
    )
    got = GGUFFile(tmp_path / "m.gguf").raw("a")
    assert got.shape == (3, 2 * block) and got.dtype == torch.float32 and got.isfinite().all()
    assert torch.equal(got[1], torch.from_numpy(gguf.quants.dequantize(rows[1:2], kind))[0])


def test_rope_settings_are_read(tmp_path, write_gguf):
    for i, rope in enumerate(
        [RopeConfig("linear", factor=4.0), RopeConfig("yarn", 500.0, 4.0, 128)]
    ):
        model = tiny_model("qwen2", rope=rope)
        assert (
            load_gguf(write_gguf(tmp_path / f"{i}.gguf", model, tokenizer=VOCABULARY)).config.rope
            == rope
        )


def test_llama3_divisors_are_recognised_and_others_raise_an_error(tmp_path, write_gguf):
    rope = RopeConfig("llama3", 500000.0, 32.0, 8192)
    model = tiny_model(rope=rope, head_dim=64)
    divisors = RopeConfig(theta=500000.0).frequencies(64) / rope.frequencies(64)
    path = write_gguf(tmp_path / "a.gguf", model, tokenizer=VOCABULARY, divisors=divisors)
    assert load_gguf(path).config.rope == rope
    path = write_gguf(tmp_path / "b.gguf", model, tokenizer=VOCABULARY, divisors=divisors + 1)
    with pytest.raises(BadRequest, match="match no published setting"):
        load_gguf(path)


def test_unsupported_files_raise_an_error_with_the_reason(tmp_path, write_gguf):
    import gguf

    model = tiny_model(num_layers=1)
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    (
        writer.write_header_to_file(),
        writer.write_kv_data_to_file(),
        writer.write_tensors_to_file(),
        writer.close(),
    )
    with pytest.raises(BadRequest, match=r"'mamba'.*llama, qwen2, qwen3.*labkit\.lab\.hf"):
        load_gguf(tmp_path / "other.gguf")
    with pytest.raises(BadRequest, match="mixture of experts"):
        load_gguf(write_gguf(tmp_path / "moe.gguf", model, expert_count=8))
    with pytest.raises(BadRequest, match=r"'wordpiece'.*gpt2, llama"):
        load_gguf(write_gguf(tmp_path / "t.gguf", model, tokenizer={"model": "wordpiece"}))
    with pytest.raises(BadRequest, match=r"'viking'.*smollm"):
        load_gguf(write_gguf(tmp_path / "p.gguf", model, tokenizer=VOCABULARY | {"pre": "viking"}))
    model = tiny_model(hidden_size=256, head_dim=64, intermediate_size=256, num_layers=1)
    with pytest.raises(BadRequest, match="TQ2_0.*" + ", ".join(TENSOR_TYPES)):
        load_gguf(write_gguf(tmp_path / "q.gguf", model, "TQ2_0"))


@pytest.mark.parametrize("keep", [3, 40, 0.5, 0.99])
def test_a_truncated_file_raises_an_error(tmp_path, write_gguf, keep):
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), tokenizer=VOCABULARY)
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if keep > 1 else int(keep * len(whole))])
    with pytest.raises(BadRequest, match=r"not a complete GGUF file"):
        GGUFFile(path)


def test_a_missing_file_and_another_format_raise_an_error(tmp_path):
    with pytest.raises(BadRequest, match="There is no file"):
        GGUFFile(tmp_path / "nothing.gguf")
    (tmp_path / "text.gguf").write_text("hello, this is not a model at all")
    with pytest.raises(BadRequest, match="not a complete GGUF"):
        GGUFFile(tmp_path / "text.gguf")
