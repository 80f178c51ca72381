"""The shape of a model from GGUF metadata.

GGUF states the same numbers as a config.json under other keys. Two things are not stated but shown by the tensors:
tied embeddings (no `output.weight`) and biases. Llama 3's rotary stretching is stored as its result, one divisor per
frequency (`rope_freqs.weight`); the settings behind it are found again by trying the published ones.
"""

from __future__ import annotations

import torch

from labkit.errors import BadRequest
from labkit.model import gemma
from labkit.model.config import ModelConfig
from labkit.model.gguf_file import GGUFFile
from labkit.model.rope import RopeConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")  # Mistral's files say "llama"


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The configuration that the file's metadata and tensors state; other architectures are refused by name."""
    if file.architecture not in ARCHITECTURES:
        raise BadRequest(
            f"{file.path.name} holds a model of architecture {file.architecture!r}: labkit.model reads GGUF files of "
            f"{', '.join(ARCHITECTURES)} (Mistral included); labkit.hf runs other models through transformers."
        )
    if file.get("{arch}.expert_count", 0):
        raise BadRequest(f"{file.path.name} holds a mixture of experts, which labkit.model does not read from GGUF.")
    shapes = file.shapes()
    vocab, hidden = shapes["token_embd.weight"]
    heads = file.get("{arch}.attention.head_count")
    head_dim = file.get("{arch}.attention.key_length") or file.get("{arch}.rope.dimension_count") or hidden // heads
    layers, window = file.get("{arch}.block_count"), file.get("{arch}.attention.sliding_window")
    ends = (file.get("tokenizer.ggml.eos_token_id"), file.get("tokenizer.ggml.eot_token_id"))
    if file.architecture == "gemma3":
        own = _gemma(file, head_dim, layers, window)
    else:
        own = {"rope": _rope(file, head_dim), "windows": (window,) * layers if window else None}
    names = {"gemma3": "gemma3_text", "llama": "mistral" if window else "llama"}
    return ModelConfig(
        architecture=names.get(file.architecture, file.architecture),
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=file.get("{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=file.get("{arch}.feed_forward_length"),
        norm_eps=file.get("{arch}.attention.layer_norm_rms_epsilon", 1e-6),
        max_positions=file.get("{arch}.context_length", 2048),
        tie_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        bos_id=file.get("tokenizer.ggml.bos_token_id"),
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        pad_id=file.get("tokenizer.ggml.padding_token_id"),
        **own,
    )


def _gemma(file: GGUFFile, head_dim: int, layers: int, window: int | None) -> dict:
    """What the file leaves to llama.cpp's own code: which layers see all, their second rotary base, the query scale."""
    kinds = [(i + 1) % gemma.PATTERN == 0 for i in range(layers)]
    large = layers == 62  # Gemma 3 27B scales queries by hidden / heads, the others by head_dim
    scalar = file.get("{arch}.embedding_length") // file.get("{arch}.attention.head_count") if large else head_dim
    return {
        "rope": _rope(file, head_dim), "local_rope": RopeConfig(theta=gemma.LOCAL_THETA),
        "windows": tuple(None if full else window for full in kinds), "attention_scale": scalar**-0.5,
    }  # fmt: skip


def _rope(file: GGUFFile, head_dim: int) -> RopeConfig:
    theta = file.get("{arch}.rope.freq_base", 10000.0)
    if "rope_freqs.weight" in file.shapes():
        divisors = file.raw("rope_freqs.weight")
        for original in (8192, 4096, 16384, 32768):
            found = RopeConfig("llama3", theta, float(divisors.max()), original)
            if torch.allclose(RopeConfig(theta=theta).frequencies(head_dim) / divisors, found.frequencies(head_dim)):
                return found
        raise BadRequest(f"{file.path.name} stretches its rotary frequencies in a way that no published setting gives.")
    kind = file.get("{arch}.rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    factor, original = (file.get(f"{{arch}}.rope.scaling.{key}") for key in ("factor", "original_context_length"))
    return RopeConfig(kind, theta, factor or 1.0, None if kind == "linear" else original)
