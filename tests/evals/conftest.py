"""A tiny random model that reads bytes, for tasks that need a tokenizer."""

from __future__ import annotations

import pytest


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


@pytest.fixture
def make_byte_model():
    return byte_model_of


@pytest.fixture
def byte_model(make_byte_model):
    return make_byte_model()
