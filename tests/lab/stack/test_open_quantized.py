"""A folder that `labkit quantize` wrote, opened by open_model: native kernels if they fit, read once."""

import pytest
import torch

from labkit.errors import BadRequest
from labkit.lab.stack import open as stack
from labkit.lab.stack.open import load_model, open_model
from labkit.model.files.quantized import save_quantized
from labkit.model.native.decoder import accelerate, unsupported_reason
from labkit.model.tiny import tiny_model
from labkit.quant import quantize_model

TOKENS = torch.arange(1, 33).view(2, 16)
pytestmark = pytest.mark.filterwarnings("ignore:.*no packed kernel")


@pytest.fixture(params=["int8", "int4", "int3_g64_zp"])
def small(request, tmp_path):
    model = tiny_model(hidden_size=64, head_dim=16, intermediate_size=128, tie_embeddings=True)
    save_quantized(model, tmp_path / "small", quantize_model(model, request.param))
    return tmp_path / "small", model, request.param


def test_a_quantized_folder_opens_on_the_fastest_kernels(small, monkeypatch):
    folder, model, recipe = small
    loads = []
    load = stack.load
    monkeypatch.setattr(stack, "load", lambda *a, **k: loads.append(k) or load(*a, **k))
    fast = open_model(folder)
    native = recipe != "int3_g64_zp" and unsupported_reason(model.config, recipe) is None
    assert (type(fast).__name__ == "NativeDecoder") == native
    assert len(loads) == 1
    expected = accelerate(model) if native else model
    assert torch.equal(fast(TOKENS), expected(TOKENS))
    for same in (open_model(folder, kernels="torch"), load_model(folder)):
        assert torch.equal(same(TOKENS), model(TOKENS))
    assert open_model(folder, dtype=torch.bfloat16).norm.weight.dtype == torch.bfloat16


def test_a_recipe_for_a_quantized_folder_is_an_error(small):
    folder, _, recipe = small
    with pytest.raises(BadRequest, match="small is quantized and.*fp32"):
        open_model(folder, "fp32")
    if recipe == "int3_g64_zp":
        with pytest.raises(BadRequest, match="int3_g64_zp"):
            open_model(folder, kernels="native")


def test_peers_cannot_read_a_quantized_folder(small):
    from labkit.lab.bench.peers import folder_of

    with pytest.raises(BadRequest, match="small.*give the original"):
        folder_of(str(small[0]))
