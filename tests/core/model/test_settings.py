"""Damaged small files and wrong settings of a checkpoint raise an error."""

from __future__ import annotations

import json

import pytest

from labkit.errors import BadRequest
from labkit.files import read_json_object
from labkit.model.config import ModelConfig
from labkit.model.load import load_folder
from labkit.model.tiny import tiny_config
from labkit.model.tokenizer import Tokenizer


@pytest.mark.parametrize(
    "content", [b"", b'{"a":', b"[1]", b"null", b"\xff\xfe\x00", b"[" * 100_000]
)
def test_the_error_for_a_damaged_json_file_names_it(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadRequest, match="config.json"):
        read_json_object(tmp_path / "config.json")
    with pytest.raises(BadRequest, match="config.json"):
        load_folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b'{"a":', b"{}", b"[]"])
def test_the_error_for_a_damaged_tokenizer_names_it(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BadRequest, match="tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": {"a": 5}}, {"weight_map": None}])
def test_the_error_for_an_index_without_files_names_it(tmp_path, index):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config().to_hf()))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadRequest, match="weight_map"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
@pytest.mark.parametrize("value", [None, "2", 0, -1, 1.5, []])
def test_a_size_that_is_not_a_whole_number_raises_an_error(key, value):
    with pytest.raises(BadRequest, match=key):
        ModelConfig.from_hf(tiny_config().to_hf() | {key: value})


@pytest.mark.parametrize(
    "odd", [{"rms_norm_eps": "x"}, {"rope_scaling": "x"}, {"rope_parameters": {"rope_theta": "x"}}]
)
def test_a_setting_of_the_wrong_type_raises_an_error(odd):
    with pytest.raises(BadRequest):
        ModelConfig.from_hf(tiny_config().to_hf() | odd)
