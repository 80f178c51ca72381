"""Compare the native decoder with a plain decoder that has the same weights."""

import subprocess
import sys

import pytest
import torch

from labkit.cache.contiguous import ContiguousCache
from labkit.cache.quantized.cache import QuantizedCache
from labkit.errors import BadRequest
from labkit.formats import round_to_nearest
from labkit.generate import generate
from labkit.kernels.native import build as native
from labkit.kernels.native.packed import NativePack
from labkit.model.native.decoder import NativeDecoder, accelerate, unsupported_reason
from labkit.model.tiny import tiny_model
from labkit.quant import quantize_model
from labkit.quant.linear import QuantizedLinear

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
MODELS = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),  # head_dim 12: plain loops
    "odd": (
        "llama",
        dict(
            hidden_size=90,
            head_dim=32,
            num_heads=6,
            num_kv_heads=2,
            intermediate_size=101,
            vocab_size=131,
            tie_embeddings=True,
        ),
    ),
    "four": (
        "llama",
        dict(head_dim=64, num_heads=4, num_kv_heads=1, o_bias=True, mlp_bias=True, qkv_bias=True),
    ),
    "window": ("mistral", dict(windows=(5, None), head_dim=96)),
}
# Mean nats a token to the same weights in float32. Random models of 32 to 90 channels average rounding over fewer numbers
# than real ones, and "odd" has logits of +-20; the products themselves are held to 6e-6 in tests/kernels.
BOUNDS = {"bf16": 1e-3, "int8": 0.02, "int4": 0.02, "int4_g64_zp": 0.02}


class OtherCache(ContiguousCache):
    """A cache that the native kernels cannot read, so that the layers run one by one."""

    def in_memory(self):
        return None


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.inference_mode():
        yield


def made(name, recipe="int4", **options) -> NativeDecoder:
    architecture, overrides = MODELS[name]
    return accelerate(tiny_model(architecture, **overrides), recipe, **options)


def tokens(model, rows, length, seed=0):
    return torch.randint(
        0, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def kl(plain, fast):
    return (plain.softmax(-1) * (plain.log_softmax(-1) - fast.log_softmax(-1))).sum(-1).mean()


@pytest.mark.parametrize("recipe", BOUNDS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_plain_decoder_with_the_same_weights(instruction_set, name, recipe):
    model = made(name, recipe, kv_dtype=torch.float32)
    ids = tokens(model, 2, 13)
    plain, fast = model.dequantized()(ids), model(ids)
    assert kl(plain, fast) < BOUNDS[recipe]
    if (
        recipe == "bf16" and instruction_set != "avx512bf16"
    ):  # exact weights, float32 activations: only the order differs
        assert (plain - fast).abs().max() < 2e-4


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "odd", "window"])
def test_batches_chunks_and_single_steps_give_equal_bits(instruction_set, name, kv_dtype):
    model = made(name, kv_dtype=kv_dtype)
    ids = tokens(model, 5, 19)
    whole = model(ids)
    cache = model.new_cache(5)
    pieces = torch.cat(
        [
            model(ids[:, :7], cache),
            model(ids[:, 7:16], cache),
            *(model(ids[:, i : i + 1], cache) for i in range(16, 19)),
        ],
        1,
    )
    assert torch.equal(whole, pieces)
    assert torch.equal(whole, torch.cat([model(row[None]) for row in ids]))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(threads):
    model, before = made("odd"), torch.get_num_threads()
    ids = tokens(model, 2, 150)
    try:
        torch.set_num_threads(1)
        one = model(ids)
        torch.set_num_threads(threads)
        assert torch.equal(model(ids), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "four", "window"])
def test_long_caches_and_odd_lengths(instruction_set, name, kv_dtype):
    """Check lengths around multiples of 512 keys, one token and a full cache."""
    model = made(name, "bf16", kv_dtype=kv_dtype)
    ids = tokens(model, 1, 600)
    plain = model.dequantized()(ids)
    cache = model.new_cache(1, capacity=600)
    start = 0
    for end in (1, 30, 511, 512, 513, 599, 600):
        fast = model(ids[:, start:end], cache)
        assert kl(plain[:, start:end], fast) < (1e-3 if kv_dtype == torch.float32 else 5e-3), end
        start = end
    with pytest.raises(BadRequest, match="full"):
        model(ids[:, :1], cache)
    assert cache.lengths == (600,)


def test_rows_of_unequal_lengths_and_padding(instruction_set):
    model = made("odd", kv_dtype=torch.float32)
    ids, counts = tokens(model, 3, 9), [9, 2, 5]
    cache = model.new_cache(3)
    last, hidden = model(ids, cache, counts, last_only=True, return_hidden=True)
    more = model(ids[:, :3], cache, [1, 3, 0])
    assert cache.lengths == (10, 5, 5) and hidden.shape == (3, 9, 90)
    for row, count in enumerate(counts):
        alone = model.new_cache(1)
        assert torch.equal(model(ids[row : row + 1, :count], alone)[:, -1], last[row])
        real = (1, 3, 0)[row]
        if real:
            assert torch.equal(model(ids[row : row + 1, :real], alone)[0], more[row, :real])


def test_hidden_states_are_the_input_of_the_head():
    model = made("llama", "bf16", kv_dtype=torch.float32)
    ids = tokens(model, 2, 6)
    logits, hidden = model(ids, return_hidden=True)
    assert torch.equal(model.head(hidden), logits)


@pytest.mark.parametrize("name", ["llama", "qwen2", "odd", "window"])
def test_other_caches_run_layer_by_layer_on_the_same_matrices(instruction_set, name):
    for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 0.02)):
        model = made(name, "bf16", kv_dtype=dtype)
        ids = tokens(model, 2, 11)
        cache = OtherCache(model.config.kv_shape, batch=2, capacity=64, dtype=dtype)
        composed = torch.cat([model(ids[:, :5], cache), model(ids[:, 5:], cache)], 1)
        assert kl(model(ids), composed).abs() < bound


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["odd", "four", "qwen3", "window"])
def test_an_int8_cache_is_read_and_written_in_one_call(instruction_set, name, kv_dtype):
    """Check codes and logits with odd lengths, several rows and rewinds."""
    model = made(name, "bf16", kv_dtype=kv_dtype)
    ids = tokens(model, 2, 45)

    class OtherInt8(QuantizedCache):
        def in_memory(self):
            return None

    one, other = (
        kind(model.config.kv_shape, batch=2, capacity=64, dtype=kv_dtype)
        for kind in (QuantizedCache, OtherInt8)
    )
    for start, end in ((0, 17), (17, 18), (18, 45)):
        fast, slow = model(ids[:, start:end], one), model(ids[:, start:end], other)
        assert kl(slow, fast).abs() < (0.01 if kv_dtype == torch.float32 else 0.03)
    codes, theirs = (
        one.packed[0][0]["codes"][:, :, :45].int(),
        other.packed[0][0]["codes"][:, :, :45].int(),
    )
    assert (codes - theirs).abs().max() <= 1 and (codes != theirs).float().mean() < 0.02
    one.rewind([5, 40])
    again = model(ids[:1, 5:6].expand(2, 1), one)
    assert one.lengths == (6, 41) and again.isfinite().all()


def test_an_int8_cache_with_extreme_keys(instruction_set):
    model = made("four", "bf16", kv_dtype=torch.float32)
    qkv = model.layers[0].attention.qkv
    for factor in (0.0, 1e4):
        before, qkv.weight.bias[:] = qkv.weight.bias.clone(), qkv.weight.bias * 0 + factor
        cache = model.new_cache(1, capacity=16, kind="int8")
        assert model(tokens(model, 1, 9), cache).isfinite().all()
        qkv.weight.bias[:] = before


def test_rewinding_and_selecting_rows_between_calls():
    model = made("odd")
    ids = tokens(model, 2, 12)
    cache = model.new_cache(2)
    model(ids, cache)
    cache.rewind([5, 8])
    cache.select([1, 1, 0])
    out = model(ids[[1, 1, 0], 8:9], cache)
    alone = model.new_cache(1)
    model(ids[1:, :8], alone)
    assert torch.equal(out[0], model(ids[1:, 8:9], alone)[0]) and torch.equal(out[0], out[1])


def test_the_cache_is_found_after_it_grows_or_is_sliced():
    model = made("odd")
    ids = tokens(model, 1, 300)
    grown = model.new_cache(1)  # 256 slots, then 512
    pieces = torch.cat([model(ids[:, :250], grown), model(ids[:, 250:], grown)], 1)
    assert torch.equal(pieces, model(ids))
    view = grown.of_layers(range(model.config.num_layers))
    view.keys, view.values = ([t.clone() for t in side] for side in (grown.keys, grown.values))
    model(ids[:, :1], view)
    assert (
        grown.lengths == (300,)
        and not grown.keys[0][:, :, 300:].any()
        and view.keys[0][:, :, 300].any()
    )


def test_greedy_text_differs_from_the_plain_decoder_only_at_near_ties(instruction_set):
    model = made("qwen2", kv_dtype=torch.float32)
    plain = model.dequantized()
    prompt = tokens(model, 1, 8)[0].tolist()
    fast = generate(model, prompt, max_new_tokens=24, end_ids=()).tokens
    slow = generate(plain, prompt, max_new_tokens=24, end_ids=()).tokens
    first = next((i for i, (a, b) in enumerate(zip(fast, slow)) if a != b), None)
    if first is not None:
        logits = plain(torch.tensor([[*prompt, *slow[:first]]]))[0, -1]
        assert logits[slow[first]] - logits[fast[first]] < 0.5, "not a near-tie"


def test_token_ids_outside_the_vocabulary_raise_an_error_and_leave_the_cache():
    model = made("llama")
    cache = model.new_cache(1)
    for bad in (-1, 96):
        with pytest.raises(BadRequest, match="vocabulary"):
            model(torch.tensor([[3, bad]]), cache)
    assert cache.lengths == (0,)


def test_unsupported_models_raise_an_error_with_the_reason(monkeypatch):
    model = tiny_model()
    with pytest.raises(BadRequest, match="int3_g64_zp"):
        accelerate(model, "int3_g64_zp")
    with pytest.raises(BadRequest, match="float16"):
        accelerate(model, kv_dtype=torch.float16)
    monkeypatch.setenv("LABKIT_NATIVE", "off")
    assert "LABKIT_NATIVE" in unsupported_reason(model.config)


@pytest.mark.parametrize(
    "recipe", ["int8", "int4", "int4_g64_zp", "int4_g32_mid", "int8_g32_mid", "int4_channel"]
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_quantized_model_keeps_its_weights(recipe, tied):
    """The native kernels multiply the weights that PyTorch's operators have, also for `middle`."""
    model = tiny_model("llama", hidden_size=128, intermediate_size=192, tie_embeddings=tied)
    quantize_model(model, recipe)
    fast = accelerate(model)
    assert fast.recipe == "quantized" and (fast.head.weight is fast.embed_tokens.weight) == tied
    for name in ("layers.0.attention.qkv", "layers.1.mlp.gate_up", "embed_tokens", "head"):
        theirs = model.get_submodule(name).weight
        theirs = theirs.quantized().dequantize() if hasattr(theirs, "quantized") else theirs.float()
        step = (theirs.amax() - theirs.amin()) / 15
        assert (fast.get_submodule(name).weight.unpacked() - theirs).abs().max() <= 0.004 * step, (
            name
        )
    with pytest.raises(BadRequest, match="quantized already.*leave the recipe out"):
        accelerate(model, "int8")


@pytest.mark.parametrize(
    "format", ["int2_g32_mid", "int3_g32_mid", "int5_g32_mid", "int8_channel_mid"]
)
def test_a_middle_format_without_a_kernel_raises_an_error(format):
    model = tiny_model("llama", hidden_size=128, intermediate_size=192)
    quantize_model(model, format)
    with pytest.raises(BadRequest, match="no native kernels"):
        accelerate(model)


def test_weights_that_a_recipe_does_not_quantize_become_bf16():
    model = tiny_model("llama", hidden_size=128, intermediate_size=192)
    alone = model.layers[0].attention.o.weight.detach().clone()
    quantized = {
        name: module for name, module in model.named_modules() if name.endswith("mlp.down")
    }
    for name, module in quantized.items():
        model.set_submodule(name, QuantizedLinear(round_to_nearest(module.weight, "int4_g32_zp")))
    fast = accelerate(model)
    assert torch.equal(fast.layers[0].attention.o.weight.unpacked(), alone.bfloat16().float())
    ids = tokens(model, 1, 9)
    assert kl(fast.dequantized()(ids), fast(ids)) < 0.02


def test_the_original_is_unchanged_or_consumed_and_memory_has_one_copy():
    model = tiny_model("llama", tie_embeddings=True)
    weight = model.layers[0].mlp.down.weight.clone()
    accelerate(model)
    assert torch.equal(model.layers[0].mlp.down.weight, weight)
    fast = accelerate(model, consume=True)
    assert model.layers[0].mlp.down.weight.numel() == 0 and model.embed_tokens.weight.numel() == 0
    assert fast.head.weight is fast.embed_tokens.weight
    storages = {
        b.untyped_storage().data_ptr()
        for m in fast.modules()
        if isinstance(m, NativePack)
        for b in [m.blocks]
    }
    assert len(storages) == 1  # one arena


def test_another_device_raises_an_error_and_another_dtype_does_nothing():
    model = made("llama")
    ids = tokens(model, 1, 4)
    before = model(ids)
    assert torch.equal(model.to(torch.bfloat16)(ids), before)
    with pytest.raises(BadRequest, match="CPU"):
        model.to("meta")


@pytest.mark.real_model
def test_packing_needs_little_memory_besides_the_two_sets_of_weights():
    """The maximum is the float32 weights, the packed weights and one matrix (the embedding)."""
    code = """
import torch
from labkit.lab.measure.bytes import peak_memory, resident_bytes, tensor_bytes
from labkit.lab.stack.open import load_model
from labkit.model.native.decoder import accelerate
from labkit.model.tiny import tiny_model
accelerate(tiny_model(), "int4")
start = resident_bytes()
model = load_model()
whole = tensor_bytes(model)
with peak_memory() as peak:
    fast = accelerate(model, "int4", consume=True)
packed, embedding = tensor_bytes(fast), 4 * fast.config.vocab_size * fast.config.hidden_size
assert peak.bytes - start < whole + packed + 1.7 * embedding, (peak.bytes - start, whole, packed)
assert resident_bytes() - start < packed + 64 * 2**20, (resident_bytes() - start, packed)
cache = fast.new_cache(1, 600)
with peak_memory() as peak:
    fast(torch.randint(0, 49152, (1, 512)), cache, last_only=True)
assert peak.grown_bytes < 96 * 2**20, peak
"""
    from labkit.lab.stack.open import converted

    converted("smollm2-135m-instruct")  # here and not there, where its memory would be counted
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.real_model
def test_int4_of_the_default_model_is_close_to_float32():
    from labkit.lab.stack.open import load_model

    plain = load_model()
    fast = accelerate(plain, "int4")
    text = "The history of the lighthouse begins with open fires on hilltops; def parse(line): return line.split(',')[1:] # fields"
    ids = torch.tensor([plain.tokenizer.encode(text)])
    want, got = plain(ids), fast(ids)
    mean = (want.softmax(-1) * (want.log_softmax(-1) - got.log_softmax(-1))).sum(-1).mean()
    assert 0 < mean < 0.012  # over a few hundred tokens it is about 0.005
