"""Walking a model: every parameter accounted for, in labkit's decoder and in transformers' models, refusals first."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from labkit.errors import BadRequest
from labkit.formats import get_format, round_to_nearest
from labkit.lab.measure.bytes import tensor_bytes
from labkit.model.folding import fold_map
from labkit.model.tiny import tiny_model
from labkit.quant import Calibration, Recipe, collect, predict, quantize_model
from labkit.quant.linear import QuantizedEmbedding, QuantizedLinear
from labkit.quant.recipe import Ends

TOKENS = torch.arange(1, 33).view(2, 16)
SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "vocab_size": 128}
pytestmark = pytest.mark.filterwarnings("ignore:.*no packed kernel")


def model(architecture="llama", **overrides):
    return tiny_model(architecture, **(SIZES | overrides))


def calibration(count=8, length=48):
    generator = torch.Generator().manual_seed(4)
    return Calibration(
        [torch.randint(0, 128, (length,), generator=generator).tolist() for _ in range(count)],
        batch=4,
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "recipe", ["int8", "int4", "bf16", "int4_g64_zp", "fp8_e4m3", "nvfp4", "int3_g64_zp"]
)
def test_predicted_bytes_are_the_models_bytes(recipe, tied):
    network = model(tie_embeddings=tied)
    elements = sum(p.numel() for p in network.parameters())
    before = predict(network, recipe).nbytes
    report = quantize_model(network, recipe)
    assert report.nbytes == tensor_bytes(network) - tensor_bytes(network.rotary)
    assert report.nbytes == before or recipe == "bf16"
    assert sum(part.elements for part in report.parts) == elements
    assert report.share > 0.99
    assert torch.isfinite(network(TOKENS)).all()


def test_every_parameter_is_in_the_report():
    network = model("qwen2", qk_norm=True)
    names = {name for name, _ in network.named_parameters()}
    report = predict(network, "int4")
    listed = {p.name if p.kind == "kept" else f"{p.name}.weight" for p in report.parts}
    assert listed == names
    assert "100.0%" in str(report).splitlines()[-1] or "99." in str(report).splitlines()[-1]


def test_quantizing_is_the_reference_weights_in_the_same_model():
    """The walk changes weights and nothing else: the same logits as the model with dequantized weights put in."""
    network, expected = model(), model()
    quantize_model(network, "int4_g64_zp", kernel="plain")
    for name, module in expected.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            format = "int8_channel" if name in ("head", "embed_tokens") else "int4_g64_zp"
            module.weight = nn.Parameter(
                round_to_nearest(module.weight.detach(), format).dequantize()
            )
    torch.testing.assert_close(network(TOKENS), expected(TOKENS))


def test_a_tied_embedding_shares_its_bytes_and_a_different_format_unties_it():
    network = model(tie_embeddings=True)
    quantize_model(network, "int8")
    assert network.embed_tokens.weight is network.head.weight
    split = model(tie_embeddings=True)
    report = quantize_model(split, Recipe("r", "int8_channel", "int8_channel", "bf16"))
    assert split.embed_tokens.weight is not split.head.weight
    assert any(p.reason.startswith("no longer tied") for p in report.parts)


def test_keeping_the_head_of_a_tied_model():
    network = model(tie_embeddings=True)
    exact = network.head.weight
    report = quantize_model(network, Recipe("r", "int8_channel", "fp32", "fp32"))
    assert network.head.weight is exact and network.embed_tokens.weight is exact
    assert report.share > 0.99 and report.block_bits() < 9
    assert report.nbytes == tensor_bytes(network) - tensor_bytes(network.rotary)  # counted once


def test_mixed_recipes_reach_the_layers_they_name():
    network = model(num_layers=3)
    recipe = Recipe(
        "m", "int4_g32_zp", first_layers=Ends(1, "int8_channel"), overrides={"*.2.mlp.down": "bf16"}
    )
    quantize_model(network, recipe)
    formats = {
        n: m.weight.format.name
        for n, m in network.named_modules()
        if isinstance(m, QuantizedLinear)
    }
    assert (
        formats["layers.0.attention.qkv"] == "int8_channel"
        and formats["layers.2.mlp.down"] == "bf16"
    )
    assert formats["layers.1.mlp.down"] in ("int4_g32_zp", "int4_g32_mid")


@pytest.mark.parametrize("method", ["clip", "gptq", "awq", "gptq+clip", "awq+gptq+clip"])
def test_calibrated_methods_come_closer_than_rounding(method):
    sequences = Calibration([row.tolist() for row in TOKENS] * 4)
    exact, rounded, better = model(), model(), model()
    for network in (exact, rounded, better):  # outlier channels, which a random model lacks
        for layer in network.layers:
            layer.attn_norm.weight[::7] *= 6
            layer.mlp_norm.weight[::9] *= 6
    exact = exact(TOKENS)
    quantize_model(rounded, "int3_g64_zp", kernel="plain")
    report = quantize_model(
        better, "int3_g64_zp", method, sequences, folds=fold_map(better), kernel="plain"
    )
    error = lambda m: float((m(TOKENS) - exact).square().mean())  # noqa: E731
    assert error(better) < error(rounded)
    assert report.method == method


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_awqs_folds_do_not_change_a_decoder(architecture):
    network = model(architecture)
    before = network(TOKENS)
    for fold in fold_map(network):
        start, stop = fold.rows or (0, network.get_submodule(fold.preceding).weight.shape[0])
        fold.apply(network, torch.rand(stop - start) + 0.5)
    torch.testing.assert_close(network(TOKENS), before, rtol=1e-3, atol=1e-3)


def test_w8a8_runs_and_stays_close():
    network = model()
    exact = network(TOKENS)
    quantize_model(network, Recipe("w8a8", activations="int8_token"))
    assert float((network(TOKENS) - exact).abs().mean() / exact.abs().mean()) < 0.05


def test_transformers_gpt2_and_its_transposed_layers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    network = transformers.GPT2LMHeadModel(config).eval()
    exact = network(TOKENS).logits
    names = {name for name, _ in network.named_parameters()}
    report = quantize_model(network, "int8_channel")
    listed = {
        p.name if p.kind == "kept" else f"{p.name}.weight" for p in report.parts if p.kind != "tied"
    }
    assert names <= listed | {f"{p.name}.weight" for p in report.parts}
    assert report.share > 0.95
    with torch.no_grad():
        error = float((network(TOKENS).logits - exact).abs().max() / exact.abs().max())
    assert error < 0.05  # the wrong orientation gives about 1


def test_conv1d_loses_what_the_equal_linear_layer_loses():
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D(96, 64)
    linear = nn.Linear(64, 96)
    linear.weight = nn.Parameter(conv.weight.detach().T.contiguous())
    linear.bias = nn.Parameter(conv.bias.detach())
    a, b = nn.Sequential(conv), nn.Sequential(linear)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(a(x), b(x))
    quantize_model(a, "int4_g32_min", kernel="plain")
    quantize_model(b, "int4_g32_min", kernel="plain")
    torch.testing.assert_close(a(x), b(x))
    assert isinstance(a[0], QuantizedLinear)


def test_fused_experts_are_seen():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    network = transformers.MixtralForCausalLM(config).eval()
    with torch.no_grad():
        exact = network(TOKENS).logits
    experts = [name for name, p in network.named_parameters() if p.ndim == 3]
    report = quantize_model(network, "int8_channel")
    if experts:  # fused in this release
        assert {p.name for p in report.parts if p.kind == "experts"} == set(experts)
    assert report.share > 0.95
    with torch.no_grad():
        assert float((network(TOKENS).logits - exact).abs().mean() / exact.abs().mean()) < 0.1


def test_a_tensor_nobody_can_quantize_is_refused_by_name():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.fused = nn.Parameter(torch.randn(2, 2, 64, 64))

    with pytest.raises(BadRequest, match=r"fused \[2, 2, 64, 64\]"):
        quantize_model(Odd(), "int8")
    report = quantize_model(Odd(), replace(Recipe.named("int8"), least_share=0.1))
    assert 0.15 < report.share < 0.25 and "not a linear layer" in str(report)


def test_nothing_is_changed_before_a_refusal():
    network = model()
    network.layers[1].mlp.down.weight[3, 3] = float("nan")
    with pytest.raises(BadRequest, match="layers.1.mlp.down.weight contains NaN"):
        quantize_model(network, "int8")
    assert not any(isinstance(m, QuantizedLinear | QuantizedEmbedding) for m in network.modules())
    network = model()
    for bad, match in [
        ({"method": "gptq"}, "needs calibration"),
        ({"method": "awq", "calibration": calibration()}, "fold_map"),
        ({"method": "nothing"}, "no method"),
    ]:
        with pytest.raises(BadRequest, match=match):
            quantize_model(network, "int4_g64_zp", **bad)
    with pytest.raises(BadRequest, match="recipe fp8_e4m3 has none"):
        quantize_model(network, "fp8_e4m3", "gptq", calibration())
    assert not any(isinstance(m, QuantizedLinear) for m in network.modules())


def test_fp16_that_does_not_fit_is_refused_before_the_cast():
    network = model()
    network.norm.weight[0] = 1e5
    with pytest.raises(BadRequest, match="norm.weight contains a weight of 1e\\+05"):
        quantize_model(network, "fp16")
    assert network.dtype == torch.float32


def test_a_layer_without_calibration_is_said_in_the_report():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(128, 64)
            self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, tokens):
            return self.used(self.embed(tokens))

    with pytest.warns(UserWarning, match="unused is rounded to nearest"):
        report = quantize_model(Routed(), "int4_g64_zp", "gptq", calibration())
    assert any("unused" in note for note in report.notes)


def test_formats_without_a_kernel_warn_through_the_walk():
    from labkit.kernels.registry import warn_no_kernel

    warn_no_kernel.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        quantize_model(model(), "int3_g64_zp")
    assert sum("no packed kernel" in str(m.message) for m in said) == 1
    assert get_format("int3_g64_zp").bits == 3


def test_an_override_that_reaches_nothing_is_refused_before_anything_is_done():
    from labkit.quant.apply import predict

    one = model()
    before = {name: p.clone() for name, p in one.named_parameters()}
    for ask in (predict, quantize_model):
        with pytest.raises(BadRequest, match="overrides '.*mlp.dwn' and no layer matches"):
            ask(one, Recipe("typo", "int4_g32_zp", overrides={"*.mlp.dwn": "int8_channel"}))
    assert all(p.equal(before[name]) for name, p in one.named_parameters())


def test_a_model_that_is_quantized_already_is_refused_by_name():
    one = model()
    quantize_model(one, "int8")
    with pytest.raises(BadRequest, match="embed_tokens is quantized already .int8_channel."):
        quantize_model(one, "int4")
    with pytest.raises(BadRequest, match="embed_tokens is quantized already .int8_channel."):
        quantize_model(one, "bf16")


def test_the_ends_of_a_recipe_of_floats_are_not_left_out():
    one = model()
    report = quantize_model(
        one, Recipe("ends", "fp32", "fp32", "fp32", first_layers=Ends(1, "int8_channel"))
    )
    assert isinstance(one.layers[0].mlp.down, QuantizedLinear) and isinstance(
        one.layers[1].mlp.down, nn.Linear
    )
    assert report.bits_per_weight < 32


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4", "fp8_e4m3"])
@pytest.mark.parametrize("method", ["gptq", "awq", "clip"])
def test_a_method_with_no_integer_codes_to_choose_is_refused(recipe, method):
    one = model()
    with pytest.raises(BadRequest, match=f"Method {method} needs integer formats"):
        quantize_model(one, recipe, method, calibration(), folds=fold_map(one))
    assert one.dtype == torch.float32 and isinstance(one.layers[0].mlp.down, nn.Linear)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_cast_refuses_what_is_no_number(value):
    one = model()
    one.layers[0].mlp.down.weight[0, 0] = value
    with pytest.raises(BadRequest, match="contains NaN or infinity"):
        quantize_model(one, "bf16")


def test_a_model_without_weights_is_refused():
    for recipe in ("int8", "bf16"):
        with pytest.raises(BadRequest, match="Sequential has no weights"):
            quantize_model(nn.Sequential(), recipe)


@pytest.mark.parametrize("method", ["gptq", "awq", "clip"])
def test_statistics_of_another_model_and_missing_ones_are_refused(method):
    one, other = model(), model(hidden_size=32)
    names = [n for n, m in one.layers.named_modules(prefix="layers") if isinstance(m, nn.Linear)]
    for seen in (collect(other, names, calibration()), collect(one, names[1:], calibration())):
        with pytest.raises(
            BadRequest, match=f"{names[0]} has 64 inputs, and its statistics are for"
        ):
            quantize_model(one, "int4_g16_zp", method, seen, folds=fold_map(one))
    with pytest.raises(BadRequest, match="needs calibration"):
        quantize_model(one, "int4_g16_zp", "gptq", {})
