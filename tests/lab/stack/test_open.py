"""One way to open a model: command, bench and notebook get the same dtype and kernels."""

import json

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from labkit.errors import BadRequest
from labkit.kernels.native import build as native
from labkit.lab.bench import arms
from labkit.lab.cli import main
from labkit.lab.stack import open as opening
from labkit.model.native.decoder import NativeDecoder
from labkit.model.tiny import tiny_model
from labkit.model.tokenizer import Tokenizer

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A tiny byte model in place of every named one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()

    def load(source="default", *, dtype=torch.float32, **_):
        model = tiny_model(vocab_size=256, hidden_size=64, head_dim=32, dtype=dtype)
        model.tokenizer = Tokenizer(backend, chat_template="{{ messages[0].content }}")
        return model

    monkeypatch.setattr(opening, "load_model", load)


def facts(model) -> tuple:
    """What decides a model's answers and its speed."""
    kernels = "native" if isinstance(model, NativeDecoder) else "torch"
    return kernels, model.dtype, type(model.layers[0].mlp.down).__name__


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16", "int8", "int4", "int3_g32_zp"])
def test_command_bench_and_notebook_open_the_same_model(recipe, kernels, monkeypatch, capsys):
    opened = []
    real = opening.open_model

    def spy(*arguments, **options):
        opened.append(real(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(opening, "open_model", spy)
    monkeypatch.setattr(arms, "open_model", spy)
    spy("default", recipe, kernels=kernels)  # a notebook
    load = arms.Load((recipe,), (), "default", 4, 2, kernels=kernels, predicted=False)
    arms.build(load, 1, lambda text: None)
    if kernels == "auto":
        line = ["generate", "--prompt", "hello", "--max-new-tokens", "2", "--json"]
        assert main([*line, "--recipe", recipe]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"]
    assert len({facts(model) for model in opened}) == 1 and len(opened) == 2 + (kernels == "auto")


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_compiler)])
def test_a_calibrated_method_gives_other_codes_on_the_same_kernels(kernels):
    plain = opening.open_model("default", "int4_g32_zp", kernels=kernels)
    clipped = opening.open_model("default", "int4_g32_zp", method="clip", kernels=kernels)
    assert facts(plain) == facts(clipped)
    ids = torch.tensor([[1, 2, 3]])
    assert not torch.equal(plain(ids), clipped(ids))


def test_a_dtype_needs_no_recipe_and_both_are_an_error():
    assert opening.open_model("default", dtype=torch.bfloat16).dtype == torch.bfloat16
    for options in ({"recipe": "int4", "dtype": torch.float32}, {"method": "gptq"}):
        with pytest.raises(BadRequest, match="recipe|Recipe"):
            opening.open_model("default", **options)


def test_the_command_accepts_both_spellings_of_a_dtype(capsys):
    line = ["generate", "--prompt", "hello", "--max-new-tokens", "2", "--json", "--dtype"]
    for spelling in ("bf16", "bfloat16"):
        assert main([*line, spelling]) == 0
    capsys.readouterr()
    assert main([*line, "int4"]) == 2 and "fp32, bf16, fp16" in capsys.readouterr().err
