"""Shared fixtures: a transformers model with the same weights, GGUF files and tokenizers."""

from __future__ import annotations

import warnings

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from labkit.model.decoder import Decoder
from labkit.model.files.names import to_hf_state_dict


def twin(model: Decoder):
    """Return the model of transformers with this configuration and views of our weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    settings = model.config.to_hf()
    config = AutoConfig.for_model(**settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
    state = to_hf_state_dict(model)
    if model.config.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    theirs.load_state_dict(state, strict=True)
    return theirs


@pytest.fixture(name="twin")
def twin_fixture():
    return twin


LLAMA_CPP_NAMES = {  # the hub's module -> llama.cpp's, written out here on its own: the reader is tested against it
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


GEMMA_NAMES = LLAMA_CPP_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(path, model, type="F32", tokenizer=None, divisors=None, **extra):
    """Write a GGUF file of the model as llama.cpp's converter does, with matrices in `type`."""
    import gguf
    import numpy as np

    config = model.config
    architecture = {"mistral": "llama", "gemma3_text": "gemma3"}.get(
        config.architecture, config.architecture
    )
    names = GEMMA_NAMES if architecture == "gemma3" else LLAMA_CPP_NAMES
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    if config.rope.kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(config.rope.kind))
        writer.add_rope_scaling_factor(config.rope.factor)
        writer.add_rope_scaling_orig_ctx_len(config.rope.original_positions or config.max_positions)
    for key, value in {
        "bos": config.bos_id,
        "eos": config.eos_ids[0],
        "padding": config.pad_id,
    }.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", value)
    for key, value in (tokenizer or {}).items():
        key = key if key == "chat_template" else f"ggml.{key}"
        add = {
            bool: writer.add_bool,
            str: writer.add_string,
            int: writer.add_uint32,
            list: writer.add_array,
        }
        add[value.__class__](f"tokenizer.{key}", value)
    for key, value in extra.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(divisors, np.float32))
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, weight in to_hf_state_dict(model).items():
        weight, (module, _, kind) = weight.numpy(), name.rpartition(".")
        if architecture == "gemma3" and "norm" in module:
            weight = weight + 1  # the converter's own line
        if module in top:
            name = f"{top[module]}.{kind}"
        else:
            index, module = module.removeprefix("model.layers.").split(".", 1)
            name = f"blk.{index}.{names[module]}.{kind}"
            heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(names[module])
            if heads and architecture == "llama":  # the converter's own line
                shape = weight.shape
                weight = (
                    weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
                    .swapaxes(1, 2)
                    .reshape(shape)
                )
        if weight.ndim == 1 or type == "F32":
            writer.add_tensor(name, np.ascontiguousarray(weight))
        else:
            quantized = gguf.GGMLQuantizationType[type]
            writer.add_tensor(name, gguf.quants.quantize(weight, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(name="write_gguf", scope="session")
def write_gguf_fixture():
    return write_gguf


CORPUS = [
    "def add(a, b):\n    return a + b  # 12345 things, isn't it?\n\n\n\treturn  x\r\n",
    "The quick brown fox's 2 dogs ÄÖÜ straße naïve — “quoted” … 数据 日本語 🙂👍🏽 ½ ٣٤٥",
    "I'LL can't we've 1000000 $3.50 <= => ~|~ a_b __init__ !!! \u00a0 x",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "   ",
    "\n",
    "\n\n x",
    "hello",
    " hello",
    "a  b   c",
    "½²३",
    "e\u0301",
    "🙂",
    "x<|end|>y",
    "1 22 333 4444",
]
SPECIAL = ["<|end|>", "<|user|>", "<s>"]


def train_byte_level(pre=None) -> Backend:
    """Train a small byte-level BPE, always the same."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    return backend


@pytest.fixture(name="train_byte_level", scope="session")
def train_byte_level_fixture():
    return train_byte_level


@pytest.fixture(scope="session")
def texts():
    return TEXTS


@pytest.fixture(scope="session")
def default_model():
    from labkit.lab.stack.open import load_model

    return load_model()


PROSE = """The lighthouse keeper had not spoken to anyone for eleven days when the boat came round the point. She was
small and grey and low in the water, and she made no sound at all. He put down the lamp that he had been cleaning, wiped
his hands, and went out on the gallery to look. There was a woman in the stern with her hand on the tiller, and she did
not wave. In 1911 that would have been a strange thing; in 1942, with the coast dark from one end to the other, it was
an ordinary one, and he thought only that she would need to be told about the rocks.
"""


@pytest.fixture(scope="session")
def sources():
    """Return prose and code of the standard library for the default model."""
    import inspect
    import textwrap

    return {"prose": PROSE, "code": inspect.getsource(textwrap)[:6000]}
