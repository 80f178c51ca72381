"""A tiny random model that reads bytes, for tasks that need a tokenizer."""

from __future__ import annotations

import pytest

from fakes import byte_model_of


@pytest.fixture
def make_byte_model():
    return byte_model_of


@pytest.fixture
def byte_model(make_byte_model):
    return make_byte_model()
