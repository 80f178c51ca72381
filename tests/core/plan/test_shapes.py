"""Compare shapes from configs with published totals and with the modules of transformers."""

import json

import pytest

from labkit.errors import BadRequest
from labkit.lab.plan.known_models import KNOWN_MODELS, known_config
from labkit.lab.plan.memory import plan, resolve
from labkit.plan.hub_config import ARCHITECTURES, kv_shape
from labkit.plan.kv import kv_bytes, kv_bytes_per_token
from labkit.plan.shapes import model_shape

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_the_fields_give_the_published_parameter_count(name):
    assert model_shape(known_config(name)).parameters == KNOWN_MODELS[name]["parameters"]


def test_there_are_about_twenty_known_models_and_the_default_is_one():
    assert len(KNOWN_MODELS) >= 20
    assert (
        resolve("default").parameters
        == resolve("HuggingFaceTB/SmolLM2-135M-Instruct").parameters
        == 134_515_008
    )
    with pytest.raises(BadRequest, match="llama-3.1-8b"):
        known_config("llama-9")


# Small configs of every architecture; the number of weights must be that of transformers' model.
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "q_lora_rank": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    **EXPERTS,
}
CONFIGS = {
    "llama": {"head_dim": 24},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "phi3": {},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32, "sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 48, **EXPERTS},
    "qwen3_moe": {"num_experts": 4, "head_dim": 24, **EXPERTS},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 24,
        "sliding_window": 8,
    },
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 128},
}


def test_every_architecture_of_the_table_is_tested():
    assert set(CONFIGS) == set(ARCHITECTURES)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_count_equals_the_modules_of_transformers(kind, tied):
    transformers = pytest.importorskip("transformers")
    import torch

    fields = CONFIGS[kind] if kind == "gpt2" else {**SMALL, **CONFIGS[kind]}
    config = transformers.AutoConfig.for_model(kind, tie_word_embeddings=tied, **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    count = sum(parameter.numel() for parameter in model.parameters())
    count += sum(
        buffer.numel()
        for name, buffer in model.named_buffers()
        if "e_score_correction_bias" in name
    )
    ours = model_shape({"model_type": kind, "tie_word_embeddings": tied, **fields})
    assert ours.parameters == count
    windows = [layer.window for layer in ours.kv.layers]
    if getattr(config, "layer_types", None) and kind != "gpt2":
        theirs = [
            config.sliding_window if kind_ == "sliding_attention" else None
            for kind_ in config.layer_types
        ]
        assert windows == theirs


def test_head_dim_of_the_config_is_used_if_it_is_stated():
    stated = {**LLAMA, "hidden_size": 5120, "num_key_value_heads": 8, "head_dim": 128}
    assert kv_shape(stated).layers[0].head_dim == 128  # 5120 / 32 would be 160
    assert kv_shape({**stated, "head_dim": None}).layers[0].head_dim == 160


@pytest.mark.parametrize("more", [{}, {"num_key_value_heads": None}])
def test_without_the_key_or_with_null_every_head_has_its_own_kv(more):
    assert kv_shape({**LLAMA, **more}).layers[0].num_kv_heads == 32


def test_heads_per_group_are_not_kv_heads():
    full, quarter, one = (
        kv_bytes_per_token(kv_shape({**LLAMA, "num_key_value_heads": n})) for n in (32, 8, 1)
    )
    assert (full, quarter, one) == (2 * 2 * 32 * 128 * 2, full // 4, full // 32)
    with pytest.raises(BadRequest, match="divisor"):
        kv_shape({**LLAMA, "num_key_value_heads": 5})


def test_gemma_3_is_five_windows_to_one_full_layer():
    windows = [layer.window for layer in resolve("gemma-3-1b").kv.layers]
    assert [i for i, window in enumerate(windows) if window is None] == [5, 11, 17, 23]
    brute = sum(2 * 1 * 256 * 2 * (min(4096, w) if w else 4096) for w in windows)
    assert kv_bytes(resolve("gemma-3-1b").kv, 4096) == brute


def test_gpt_oss_alternates_and_begins_with_a_window():
    windows = [layer.window for layer in resolve("gpt-oss-20b").kv.layers]
    assert windows == [128, None] * 12
    assert kv_bytes_per_token(resolve("gpt-oss-20b").kv) == 12 * 2 * 8 * 64 * 2


def test_a_layer_that_shares_reads_the_last_layer_of_its_kind():
    shared = kv_shape(
        {
            **LLAMA,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "num_key_value_heads": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        }
    )
    assert [layer.shared_with for layer in shared.layers] == [None, None, None, None, 2, 3]
    assert kv_bytes(shared, 100, kv_format="bf16") == 2 * 8 * 128 * 2 * (2 * 16 + 2 * 100)


def test_deepseek_caches_a_latent_and_a_rotary_part():
    assert kv_bytes_per_token(resolve("deepseek-v3").kv) == 70_272


def test_qwen_has_windows_only_if_the_config_says_so():
    config = {**known_config("qwen2.5-7b"), "sliding_window": 4096, "max_window_layers": 20}
    assert all(layer.window is None for layer in kv_shape(config).layers)
    config["use_sliding_window"] = True
    assert [layer.window for layer in kv_shape(config).layers] == [None] * 20 + [4096] * 8


def test_a_config_file_its_folder_and_a_multimodal_config_are_read(tmp_path):
    config = known_config("gemma-3-1b")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": config})
    )
    (tmp_path / "other").write_text(json.dumps(config))
    count = KNOWN_MODELS["gemma-3-1b"]["parameters"]
    for source in (
        tmp_path / "config.json",
        str(tmp_path / "config.json"),
        str(tmp_path),
        str(tmp_path / "other"),
    ):
        assert resolve(source).parameters == count


@pytest.mark.parametrize("content", ["# A text", "[1, 2]", ""])
def test_a_file_that_is_not_a_json_object_raises(tmp_path, content):
    path = tmp_path / "README.md"
    path.write_text(content)
    with pytest.raises(BadRequest, match="is not a JSON model configuration; give a config.json"):
        resolve(path)


def test_missing_fields_of_gemma_3_4b_get_defaults():
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    shape = model_shape({"model_type": "gemma3", "text_config": text})
    assert (shape.num_heads, shape.kv.layers[0].num_kv_heads, shape.kv.layers[0].head_dim) == (
        8,
        4,
        256,
    )
    transformers = pytest.importorskip("transformers")
    import torch

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.Gemma3TextConfig(**text))
    assert shape.tied and shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "config, words",
    [
        ({"model_type": "mamba"}, "mamba"),
        ({}, "None"),
        ({**LLAMA, "hidden_size": "many"}, "hidden_size"),
        ({**LLAMA, "hidden_size": 4100}, "head_dim"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_a_config_that_is_not_valid_raises(config, words):
    with pytest.raises(BadRequest, match=words):
        model_shape(config)


def test_a_labkit_model_has_the_shape_of_its_own_tensors():
    from labkit.model.tiny import tiny_model

    for kind in ("llama", "qwen2", "qwen3"):
        model = tiny_model(kind)
        assert resolve(model.config).parameters == sum(
            {id(p): p.numel() for p in model.parameters()}.values()
        )
        assert resolve(model.config).kv == model.config.kv_shape


def test_the_plan_has_the_keys_of_the_command_and_adds_up():
    result = plan(
        "llama-3.1-8b", tokens=4096, sequences=2, recipe="int8", kv_format="int8", budget="16GiB"
    )
    parts = ("weight_bytes", "kv_bytes", "activation_bytes", "logit_bytes", "workspace_bytes")
    assert result["total_bytes"] == sum(result[part] for part in parts)
    assert result["kv_bytes_per_token"] == 32 * 2 * 8 * (128 + 4)
    most = result["max_sequences"]
    fits, over = (
        plan("llama-3.1-8b", tokens=4096, sequences=n, recipe="int8", kv_format="int8")
        for n in (most, most + 1)
    )
    assert fits["total_bytes"] <= 16 * 2**30 < over["total_bytes"]
    assert fits["max_sequences"] is None
    assert plan("llama-3.1-70b", budget="16GiB")["max_sequences"] == 0
    assert json.dumps(result)


@pytest.mark.parametrize(
    "ask, words",
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"sequences": True}, "sequences"),
        ({"recipe": "int1"}, "Q4_K_M"),
        ({"kv_format": "x"}, "KV format"),
        ({"budget": "16G"}, "GiB"),
        ({"budget": "-3GiB"}, "amount of memory"),
    ],
)
def test_arguments_of_plan_that_are_not_valid_raise(ask, words):
    with pytest.raises(BadRequest, match=words):
        plan("default", **ask)


def test_planning_needs_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; from labkit.lab.plan.memory import plan, render; render(plan('default')); "
        "import labkit.plan.time, labkit.lab.plan.operator_times; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "gpt2"])
def test_a_missing_key_has_the_default_of_transformers_or_raises_with_its_name(kind):
    configuration = pytest.importorskip("transformers").CONFIG_MAPPING[kind]
    sizes = {"num_attention_heads": 64, "num_key_value_heads": 4, "hidden_size": 4096}
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    base = {**SMALL, **CONFIGS[kind], **sizes, **windows}
    for key in base:
        fields = {name: value for name, value in base.items() if name != key}
        theirs = configuration(**fields)
        try:
            ours = kv_shape({"model_type": kind, **fields})
        except BadRequest as error:
            assert key in str(error)
            continue
        layer = ours.layers[0]
        if layer.latent_dim is not None:
            assert (layer.latent_dim, layer.rope_dim) == (
                theirs.kv_lora_rank,
                theirs.qk_rope_head_dim,
            )
            continue
        heads = theirs.num_attention_heads
        width = getattr(theirs, "head_dim", None) or theirs.hidden_size // heads
        assert (layer.num_kv_heads, layer.head_dim) == (theirs.num_key_value_heads, width), key
        kinds = getattr(theirs, "layer_types", None)
        if kind not in ("llama", "gemma"):  # these ignore a window
            window = theirs.sliding_window
            expected = [
                window if kinds is None or "sliding" in one else None
                for one in kinds or [""] * len(ours.layers)
            ]
            assert [one.window for one in ours.layers] == expected, key


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention", "mamba", "sliding", 3])
def test_a_layer_kind_that_is_not_known_raises_with_its_name(kind):
    kinds = [kind, "full_attention"]
    with pytest.raises(BadRequest, match=str(kind)):
        kv_shape({**LLAMA, "model_type": "qwen3", "layer_types": kinds})


@pytest.mark.parametrize("method", ["gptq", "fp8", "compressed-tensors"])
def test_a_quantized_checkpoint_needs_the_formats(method):
    config = {**LLAMA, "quantization_config": {"quant_method": method}}
    with pytest.raises(BadRequest, match=method):
        plan(config)
    with pytest.raises(BadRequest, match="kv_format"):
        plan(config, recipe="int4")
    assert plan(config, recipe="int4", kv_format="bf16")["recipe"] == "int4"
    with pytest.raises(BadRequest, match="mxfp4"):
        plan("gpt-oss-20b")


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_scaled_positions_stretch_the_context(kind):
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 32}
    config = {**LLAMA, "max_position_embeddings": 32, "rope_scaling": scaling}
    assert model_shape(config).max_positions == 128
