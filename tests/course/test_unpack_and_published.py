"""Unpacked models hold the packed numbers, tied as before; the published recipe counts what a module walk cannot."""

import copy

import pytest
import torch

from labkit.lab.plan.memory import resolve
from labkit.model.tiny import tiny_model
from labkit.plan.weights import weight_bytes
from labkit.quant import QuantizedLinear, quantize_model
from labkit.quant.linear import unpack_model
from labkit_course.experiments.published import published_bytes, quantize_dynamic, why_not


def test_the_numbers_are_the_packed_ones_and_the_tie_stays():
    model = tiny_model(tie_embeddings=True)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    quantize_model(model, "int4_g32_zp", kernel="plain")
    want = model(tokens)
    assert any(isinstance(m, QuantizedLinear) for m in model.modules())
    unpack_model(model)
    assert not any(isinstance(m, QuantizedLinear) for m in model.modules())
    assert model.head.weight is model.embed_tokens.weight
    torch.testing.assert_close(model(tokens), want, rtol=1e-5, atol=1e-5)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_bias_is_kept():
    model = tiny_model("qwen2")
    quantize_model(model, "int8_channel", kernel="plain")
    want = model(torch.tensor([[1, 2, 3]]))
    torch.testing.assert_close(
        unpack_model(model)(torch.tensor([[1, 2, 3]])), want, rtol=1e-5, atol=1e-5
    )


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_published_recipe_leaves_the_embedding_and_stores_a_tied_head_twice():
    model = tiny_model(tie_embeddings=True)
    before = copy.deepcopy(model.state_dict())
    changed = quantize_dynamic(model)
    parts = published_bytes(changed)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    matrices = sum(isinstance(m, torch.nn.Linear) for m in model.modules())
    assert parts["linear"] == linear + 16 * matrices
    assert parts["embedding"] == 4 * model.embed_tokens.weight.numel()
    assert sum(parts.values()) > weight_bytes(resolve(model.config), "fp32") / 4
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert changed(torch.tensor([[1, 2, 3]])).isfinite().all()
