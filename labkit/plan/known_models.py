"""Well-known models as data: the fields of their config.json that matter here, and their published parameter count.

Fields are those of each model's config.json on the hub; counts are the totals of its safetensors files (each weight
once, text part only). A test rebuilds every count from the fields. DeepSeek-V3 is without its prediction module.
"""

from __future__ import annotations

from labkit.errors import BadRequest


def _dense(kind, hidden, layers, heads, kv_heads, inner, vocab, positions, **more):
    return {"model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": vocab,
            "max_position_embeddings": positions, "torch_dtype": "bfloat16", **more}


_TIED = {"tie_word_embeddings": True}
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

#         name: (published parameters, config)
KNOWN_MODELS: dict[str, tuple[int, dict]] = {
    "gpt2": (124_439_808, {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
                           "n_positions": 1024, "torch_dtype": "float32"}),
    "smollm2-135m": (134_515_008, _dense("llama", 576, 30, 9, 3, 1536, 49152, 8192, **_TIED)),
    "smollm2-360m": (361_821_120, _dense("llama", 960, 32, 15, 5, 2560, 49152, 8192, **_TIED)),
    "smollm2-1.7b": (1_711_376_384, _dense("llama", 2048, 24, 32, 32, 8192, 49152, 8192, **_TIED)),
    "qwen2.5-0.5b": (494_032_768, _dense("qwen2", 896, 24, 14, 2, 4864, 151936, 32768, **_TIED)),
    "qwen2.5-1.5b": (1_543_714_304, _dense("qwen2", 1536, 28, 12, 2, 8960, 151936, 32768, **_TIED)),
    "qwen2.5-7b": (7_615_616_512, _dense("qwen2", 3584, 28, 28, 4, 18944, 152064, 32768)),
    "qwen3-0.6b": (596_049_920, _dense("qwen3", 1024, 28, 16, 8, 3072, 151936, 40960, head_dim=128, **_TIED)),
    "qwen3-4b": (4_022_468_096, _dense("qwen3", 2560, 36, 32, 8, 9728, 151936, 40960, head_dim=128, **_TIED)),
    "qwen3-8b": (8_190_735_360, _dense("qwen3", 4096, 36, 32, 8, 12288, 151936, 40960, head_dim=128)),
    "qwen3-30b-a3b": (30_532_122_624, _dense(
        "qwen3_moe", 2048, 48, 32, 4, 6144, 151936, 40960, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768)),
    "llama-2-7b": (6_738_415_616, _dense("llama", 4096, 32, 32, 32, 11008, 32000, 4096, torch_dtype="float16")),
    "llama-3.2-1b": (1_235_814_400, _dense("llama", 2048, 16, 32, 8, 8192, 128256, 131072, head_dim=64, **_TIED)),
    "llama-3.2-3b": (3_212_749_824, _dense("llama", 3072, 28, 24, 8, 8192, 128256, 131072, head_dim=128, **_TIED)),
    "llama-3.1-8b": (8_030_261_248, _dense("llama", 4096, 32, 32, 8, 14336, 128256, 131072)),
    "llama-3.1-70b": (70_553_706_496, _dense("llama", 8192, 80, 64, 8, 28672, 128256, 131072)),
    "mistral-7b-v0.1": (7_241_732_096, _dense("mistral", 4096, 32, 32, 8, 14336, 32000, 32768, sliding_window=4096)),
    "mixtral-8x7b": (46_702_792_704, _dense("mixtral", 4096, 32, 32, 8, 14336, 32000, 32768, num_local_experts=8,
                                            num_experts_per_tok=2)),
    "gemma-2-2b": (2_614_341_888, _dense("gemma2", 2304, 26, 8, 4, 9216, 256000, 8192, head_dim=256,
                                         sliding_window=4096)),
    "gemma-3-270m": (268_098_176, _dense("gemma3_text", 640, 18, 4, 1, 2048, 262144, 32768, head_dim=256,
                                         sliding_window=512)),
    "gemma-3-1b": (999_885_952, _dense("gemma3_text", 1152, 26, 4, 1, 6912, 262144, 32768, head_dim=256,
                                       sliding_window=512)),
    "phi-3-mini": (3_821_079_552, _dense("phi3", 3072, 32, 32, 32, 8192, 32064, 4096, sliding_window=2047)),
    "deepseek-v2-lite": (15_706_484_224, _dense(
        "deepseek_v2", 2048, 27, 16, 16, 10944, 102400, 163840, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1, q_lora_rank=None, **_MLA)),
    "deepseek-v3": (671_026_419_200, _dense(
        "deepseek_v3", 7168, 61, 128, 128, 18432, 129280, 163840, n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, q_lora_rank=1536, **_MLA)),
    "gpt-oss-20b": (20_914_757_184, _dense(
        "gpt_oss", 2880, 24, 64, 8, 2880, 201088, 131072, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
        sliding_window=128)),
}
OTHER_NAMES = {"default": "smollm2-135m", "smollm2-135m-instruct": "smollm2-135m", "llama-3-8b": "llama-3.1-8b"}


def known_config(name: str) -> dict:
    """The config of a known model; names are compared without case, owner, or the ending -Instruct."""
    short = name.lower().rsplit("/", 1)[-1]
    for candidate in (short, OTHER_NAMES.get(short), short.removesuffix("-instruct"), short.removesuffix("-it")):
        if candidate in KNOWN_MODELS:
            return dict(KNOWN_MODELS[candidate][1], _name_or_path=candidate)
    raise BadRequest(f"model {name!r} is not in the table of known models; choose one of {', '.join(KNOWN_MODELS)}, "
                     "or give a config.json.")
