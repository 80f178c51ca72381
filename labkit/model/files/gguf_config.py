"""The configuration of a model, from GGUF metadata.

GGUF states the same numbers as a config.json under other keys. Some things are not stated
but shown by the tensors: tied embeddings (no `output.weight`) and biases. Llama 3's rotary
stretching is stored as its result, one divisor per frequency (`rope_freqs.weight`); the
settings behind it are found by trying the published ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from labkit.errors import BadRequest
from labkit.model.config import ModelConfig
from labkit.model.files.gguf import GGUFFile
from labkit.model.rope import RopeConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")  # Mistral's files say "llama"


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Return the configuration that metadata and tensors state; raises BadRequest for others."""
    if file.architecture not in ARCHITECTURES:
        raise BadRequest(
            f"{file.path.name} holds a model of architecture {file.architecture!r}: labkit.model "
            f"reads GGUF files of {', '.join(ARCHITECTURES)} (Mistral included); labkit.lab.hf "
            "runs other models through transformers."
        )
    if file.get("{arch}.expert_count", 0):
        raise BadRequest(
            f"{file.path.name} holds a mixture of experts, which labkit.model does not read from "
            "GGUF; labkit.lab.hf runs the model's safetensors through transformers."
        )
    shapes = file.shapes()
    vocab, hidden = shapes["token_embd.weight"]
    heads, layers = file.get("{arch}.attention.head_count"), file.get("{arch}.block_count")
    window = file.get("{arch}.attention.sliding_window")
    head_dim = (
        file.get("{arch}.attention.key_length")
        or file.get("{arch}.rope.dimension_count")
        or hidden // heads
    )
    ends = (file.get("tokenizer.ggml.eos_token_id"), file.get("tokenizer.ggml.eot_token_id"))
    names = {"gemma3": "gemma3_text", "llama": "mistral" if window else "llama"}
    # Gemma 3 27B, the one of 62 layers, scales queries by hidden / heads instead of head_dim.
    scalar = hidden // heads if layers == 62 else head_dim
    config = ModelConfig.from_hf(
        {
            "model_type": names.get(file.architecture, file.architecture),
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": file.get("{arch}.attention.head_count_kv"),
            "head_dim": head_dim,
            "intermediate_size": file.get("{arch}.feed_forward_length"),
            "rms_norm_eps": file.get("{arch}.attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": file.get("{arch}.context_length", 2048),
            "tie_word_embeddings": "output.weight" not in shapes,
            "query_pre_attn_scalar": scalar,
            "sliding_window": window,
            "use_sliding_window": bool(window),
            "max_window_layers": 0,
            "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(dict.fromkeys(id for id in ends if id is not None)),
            "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
        }
    )
    return replace(
        config,
        rope=_rope(file, head_dim),
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
    )


def _rope(file: GGUFFile, head_dim: int) -> RopeConfig:
    theta = file.get("{arch}.rope.freq_base", 10000.0)
    if "rope_freqs.weight" in file.shapes():
        divisors = file.raw("rope_freqs.weight")
        stretched = RopeConfig(theta=theta).frequencies(head_dim) / divisors
        for original in (8192, 4096, 16384, 32768):
            published = RopeConfig("llama3", theta, float(divisors.max()), original)
            if torch.allclose(stretched, published.frequencies(head_dim)):
                return published
        raise BadRequest(
            f"{file.path.name} stretches its rotary frequencies in a way that no published "
            "setting gives; take the checkpoint's safetensors folder."
        )
    kind = file.get("{arch}.rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = file.get("{arch}.rope.scaling.factor") or 1.0
    original = file.get("{arch}.rope.scaling.original_context_length")
    return RopeConfig(kind, theta, factor, None if kind == "linear" else original)
