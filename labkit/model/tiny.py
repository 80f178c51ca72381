"""Tiny models with random weights, for tests and first steps.

They have every part of a real model and run in microseconds. The default shapes reveal
errors that square shapes hide: there are fewer KV heads than query heads, and for Qwen3 and
Gemma 3, head_dim is not hidden_size / num_heads. The weights are large enough for clearly
different logits. Norms and biases are random, not ones and zeros. Unlike a trained model, a
random model has no attention sinks and no outliers.
"""

from __future__ import annotations

from typing import Any

import torch

from labkit.model.config import ModelConfig
from labkit.model.decoder import Decoder
from labkit.model.rope import RopeConfig


def tiny_config(architecture: str = "llama", **overrides) -> ModelConfig:
    """Return the configuration of two layers with hidden size 32 and 96 tokens.

    `overrides` are fields of `ModelConfig`.
    """
    values: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": 96,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12 if architecture in ("qwen3", "gemma3_text") else 8,
        "intermediate_size": 48,
        "norm_eps": 1e-5,
        "max_positions": 512,
        "qkv_bias": architecture == "qwen2",
        "qk_norm": architecture in ("qwen3", "gemma3_text"),
        "bos_id": 1,
        "eos_ids": (2,),
        "pad_id": 2,
    }
    if architecture == "gemma3_text":
        values |= {
            "windows": (5, None),
            "local_rope": RopeConfig(),
            "rope": RopeConfig(theta=1e6),
            "attention_scale": 20**-0.5,
            "tie_embeddings": True,
        }
    return ModelConfig(**(values | overrides))


def tiny_model(
    architecture: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides
) -> Decoder:
    """Return a decoder with random weights, in eval mode, without gradients.

    Equal seeds give equal weights. `overrides` are fields of `ModelConfig`.
    """
    model = Decoder(tiny_config(architecture, **overrides))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_((0 if model.config.is_gemma else 1) + 0.2 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.2 * noise)
            elif name.startswith("embed_tokens"):
                weight.copy_(noise)
            else:
                weight.copy_(1.5 * noise / weight.shape[1] ** 0.5)
    model.name = f"tiny-{architecture}-{seed}"
    return model.to(dtype).eval().requires_grad_(False)
