"""Read the configuration of a model from GGUF metadata.

GGUF has the numbers of a config.json under other keys. Two settings follow from the
tensors in the file: tied embeddings (no `output.weight`) and biases. For Llama 3's RoPE,
the file stores one divisor per frequency (`rope_freqs.weight`) and not the settings. This
module tries the published settings until one gives these divisors.
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
    """Return the configuration of the model in a file.

    Raises BadRequest if the decoder does not support the architecture or its RoPE.
    """
    experts = file.get("{arch}.expert_count")
    kind = "mixture of experts" if experts else file.architecture
    if kind not in ARCHITECTURES:
        raise BadRequest(
            f"{file.path.name} is a {kind!r} model; labkit reads GGUF files of "
            f"{', '.join(ARCHITECTURES)}. Run its safetensors with labkit.lab.hf."
        )
    shapes = file.shapes()
    vocab, hidden = shapes["token_embd.weight"]
    heads, layers = file.get("{arch}.attention.head_count"), file.get("{arch}.block_count")
    window = file.get("{arch}.attention.sliding_window")
    keys = ("{arch}.attention.key_length", "{arch}.rope.dimension_count")
    head_dim = next(filter(None, map(file.get, keys)), hidden // heads)
    ends = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    names = {"gemma3": "gemma3_text", "llama": "mistral" if window else "llama"}
    # Only Gemma 3 27B has 62 layers. It uses hidden / heads in place of head_dim here.
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
            f"{file.path.name} has RoPE divisors that match no published setting; "
            "load the checkpoint's safetensors folder."
        )
    kind = file.get("{arch}.rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = file.get("{arch}.rope.scaling.factor") or 1.0
    original = file.get("{arch}.rope.scaling.original_context_length")
    return RopeConfig(kind, theta, factor, None if kind == "linear" else original)
