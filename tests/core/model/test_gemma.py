"""Check the parts and the configuration that only Gemma 3 has."""

import pytest
import torch

from labkit.errors import BadRequest
from labkit.model.config import ModelConfig
from labkit.model.files.gguf import GGUFFile
from labkit.model.files.gguf_config import config_from_gguf
from labkit.model.files.names import fill
from labkit.model.load import empty
from labkit.model.rope import RopeConfig
from labkit.model.tiny import tiny_model
from labkit.plan.kv import kv_bytes


def logits(model, length=30):
    tokens = torch.randint(3, 96, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model(tokens)[0]


@pytest.mark.parametrize(
    "change",
    [
        {"windows": (5, 5)},
        {"windows": (None, None)},
        {"attention_scale": 12**-0.5},
        {"local_rope": RopeConfig(theta=1e6)},
        {"rope": RopeConfig(theta=1e4)},
    ],
)
def test_every_part_of_gemma_changes_the_logits(change):
    assert (
        logits(tiny_model("gemma3_text", **change)) - logits(tiny_model("gemma3_text"))
    ).abs().max() > 1e-3


def test_the_query_scale_may_differ_from_head_dim(twin):
    model = tiny_model("gemma3_text", attention_scale=48**-0.5, head_dim=16)
    theirs = twin(model)
    tokens = torch.arange(3, 33)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


def test_linear_rope_applies_only_to_layers_without_a_window(twin):
    model = tiny_model("gemma3_text", rope=RopeConfig("linear", 1e6, 8.0))
    tokens = torch.arange(3, 43)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), twin(model)(tokens).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["contiguous", "windowed"])
def test_chunks_through_a_cache_equal_one_pass_and_windows_bound_the_bytes(kind):
    model = tiny_model("gemma3_text", windows=(5, None))
    tokens = torch.arange(3, 43)[None]
    with torch.inference_mode():
        cache = model.new_cache(1, 64, kind)
        pieces = torch.cat([model(piece, cache) for piece in tokens.split([17, 3, 1, 1, 18], 1)], 1)
        torch.testing.assert_close(pieces, model(tokens), atol=1e-4, rtol=0)
    if kind == "windowed":
        assert (
            cache.nbytes_used()
            == kv_bytes(model.config.kv_shape, 40, 1, "fp32")
            == (5 + 40) * 2 * 2 * 12 * 4
        )


def test_older_and_newer_configs_give_the_same_configuration():
    newer = tiny_model("gemma3_text").config.to_hf()
    assert ModelConfig.from_hf(newer) == tiny_model("gemma3_text").config
    older = {k: v for k, v in newer.items() if k not in ("rope_parameters", "layer_types")} | {
        "sliding_window_pattern": 2
    }
    assert ModelConfig.from_hf(older) == tiny_model("gemma3_text").config
    plain = {
        k: newer[k]
        for k in (
            "model_type",
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "intermediate_size",
        )
    }
    config = ModelConfig.from_hf(plain | {"num_hidden_layers": 12})
    assert (
        config.windows == (*(4096,) * 5, None) * 2
        and config.rope.theta == 1e6
        and config.local_rope.theta == 1e4
    )
    assert config.attention_scale == 256**-0.5 and config.tie_embeddings and config.head_dim == 256


@pytest.mark.parametrize(
    "name", ["attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"]
)
def test_settings_that_are_not_supported_raise_an_error(name):
    with pytest.raises(BadRequest, match=name):
        ModelConfig.from_hf(tiny_model("gemma3_text").config.to_hf() | {name: 30.0})


def test_a_gguf_file_gives_the_same_model(tmp_path, write_gguf):
    """The file stores 1 + weight for norms, and neither windows per layer nor the local RoPE base."""
    windows = (*(6,) * 5, None, 6)
    model = tiny_model("gemma3_text", num_layers=7, windows=windows, attention_scale=12**-0.5)
    path = write_gguf(tmp_path / "tiny.gguf", model, **{"attention.sliding_window": 6})
    file = GGUFFile(path)
    read = empty(config_from_gguf(file))
    fill(read, file.tensors(), "tiny.gguf")
    assert read.config == model.config
    torch.testing.assert_close(logits(read), logits(model), atol=1e-5, rtol=0)
