"""Stand-ins that several tests share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

FORMATS = tuple(
    "fp32 fp16 bf16 fp8_e4m3 nvfp4 int8_channel int8_token int8_tensor int8_g32_sym int4_channel "
    "int4_g32_sym int4_g32_zp int4_g32_min int4_g64_zp int4_g128_zp int3_channel int3_g64_zp "
    "int2_g32_zp".split()
)


def load_script(path: str):
    """A maker of data or figures, `data/NAME.py` or `figures/NAME.py`, as a module."""
    file = Path(__file__).parents[1] / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


class ByteTokenizer:
    """A tokenizer whose tokens are bytes; 0 to 2 are special."""

    bos_id, eos_ids, special_ids, vocab_size, drops_first_space = None, (2,), (0, 1, 2), 256, False

    def encode(self, text, add_bos=None):
        return list(text.encode())

    def chat(self, text):
        return self.encode(f"<{text}>")

    def token_bytes(self, id):
        return bytes([id])

    def decode(self, ids, skip_special=True, continues=False):
        return bytes(ids).decode("utf-8", errors="replace")


class WordTokenizer:
    """A tokenizer with one number per word; a word keeps its number."""

    def __init__(self):
        self.known = {}

    def encode(self, text):
        return [self.known.setdefault(word, len(self.known) + 1) for word in text.split()]

    def decode(self, ids):
        words = {number: word for word, number in self.known.items()}
        return " ".join(words[number] for number in ids)

    def byte_counts(self, ids):
        return [len(self.decode([number])) for number in ids]


def byte_tokenizer(**options):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    from labkit.model.tokenizer import Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, **options)


def byte_model_of(seed: int = 0, chat: bool = True, name: str | None = None, **overrides):
    from labkit.model.tiny import tiny_model

    model = tiny_model(seed=seed, **{"vocab_size": 256, "max_positions": 8192, **overrides})
    model.tokenizer = byte_tokenizer(chat_template="<{{ messages[0].content }}>" if chat else None)
    model.name = name or model.name
    return model
