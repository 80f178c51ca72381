"""Layer by layer: the replay is the model, and each block is calibrated on what the quantized blocks before it give."""

import copy
from dataclasses import replace

import pytest
import torch

from labkit.errors import BadRequest
from labkit.model.folding import fold_map
from labkit.model.tiny import tiny_model
from labkit.quant import Calibration, Recipe, quantize_model
from labkit.quant import apply as walk
from labkit.quant.calibrate import collect
from labkit.quant.layer_by_layer import Replay


def text(vocab: int, lengths=(24, 24, 17, 9), **how) -> Calibration:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]
    return Calibration(rows, batch=2, **how)


def linears(model) -> list[str]:
    return [
        n
        for n, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and n.startswith("layers.")
    ]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
def test_the_replay_of_an_unchanged_model_sees_what_the_model_sees(architecture):
    model = tiny_model(architecture)
    calibration = text(model.config.vocab_size)
    once = collect(model, linears(model), calibration)
    replay = Replay(model, replace(calibration, blocks=model.layers))
    for index in range(len(model.layers)):
        names = [n for n in linears(model) if n.startswith(f"layers.{index}.")]
        seen = collect(model, names, calibration, replay.forward(index))
        for name in names:
            assert (
                seen[name].tokens == calibration.tokens == once[name].tokens
            )  # padding never counted here either
            torch.testing.assert_close(seen[name].hessian, once[name].hessian)
        replay.advance(index)


def test_a_block_is_calibrated_on_the_quantized_blocks_before_it(monkeypatch):
    model, calibration = tiny_model(), text(tiny_model().config.vocab_size)
    recipe = Recipe("blocks", "int2_g16_zp", "fp32", "fp32")
    seen = {}
    original = walk.quantize

    def spy(weight, format, statistics, method, name):
        seen[name] = statistics
        return original(weight, format, statistics, method, name)

    monkeypatch.setattr(walk, "quantize", spy)
    done = copy.deepcopy(model)
    blocks = replace(calibration, blocks=done.layers)
    quantize_model(done, recipe, "gptq", blocks, kernel="plain")
    last = len(model.layers) - 1
    name = f"layers.{last}.attention.qkv"
    before, whole = (
        collect(model, [name], calibration)[name],
        collect(done, [name], calibration)[name],
    )
    torch.testing.assert_close(seen[name].hessian, whole.hessian)
    assert not torch.allclose(before.hessian, whole.hessian, rtol=0.01)


def test_folds_stay_exact_when_they_are_made_block_by_block():
    model, calibration = tiny_model(), text(tiny_model().config.vocab_size)
    done = copy.deepcopy(model)
    recipe = Recipe("fine", "int8_g16_zp", "fp32", "fp32")
    report = quantize_model(
        done,
        recipe,
        "awq+gptq+clip",
        replace(calibration, blocks=done.layers),
        folds=fold_map(done),
        kernel="plain",
    )
    tokens = torch.arange(12)[None]
    assert float((done(tokens) - model(tokens)).abs().max()) < 0.05 * float(
        model(tokens).abs().max()
    )
    assert any(f"folded {len(fold_map(model))} scales" in note for note in report.notes)
    assert report.nbytes == walk.predict(model, recipe, "plain").nbytes


def test_a_transformers_model_is_replayed_with_its_masks_and_a_cache_is_refused():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=64,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    calibration = text(64)
    name = "model.layers.1.mlp.down_proj"
    plain = lambda m, tokens, counts: m(tokens, use_cache=False)  # noqa: E731
    layers = model.model.layers
    replay = Replay(model, replace(calibration, blocks=layers, forward=plain))
    replay.advance(0)
    seen = collect(model, [name], calibration, replay.forward(1))[name]
    torch.testing.assert_close(
        seen.hessian, collect(model, [name], calibration, plain)[name].hessian
    )
    with pytest.raises(BadRequest, match="KV cache"):
        Replay(model, replace(calibration, blocks=layers))


def test_blocks_that_are_not_this_models_layers_in_order_are_refused():
    model, calibration = tiny_model(), text(tiny_model().config.vocab_size)
    layers = list(model.layers)
    for blocks in (
        list(tiny_model().layers),
        [layers[0], layers[0]],
        ["layers.0"],
        layers[::-1],
        [one.mlp for one in layers],
    ):
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(BadRequest, match="blocks=model.layers"):
            quantize_model(
                model,
                Recipe("b", "int4_g16_zp", "fp32", "fp32"),
                "gptq",
                replace(calibration, blocks=blocks),
            )
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert not any(
            module._forward_hooks or module._forward_pre_hooks for module in model.modules()
        )
