"""labkit's caches inside transformers' generate, against transformers' own cache, on random tiny models."""

import re

import pytest
import torch

transformers = pytest.importorskip("transformers")

from labkit.cache import quantized_cache, windowed_cache  # noqa: E402
from labkit.errors import BadRequest  # noqa: E402
from labkit.lab.hf import LabCache, kv_shape, unsupported_reason  # noqa: E402
from labkit.plan.kv import kv_bytes  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 8,
}
MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "phi3": {},
    "granite": {},
    "olmo2": {},
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
}


def make(name, **more):
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    common = {
        k: v for k, v in COMMON.items() if name != "gpt2" or k.endswith(("_id", "vocab_size"))
    }
    config = transformers.AutoConfig.for_model(name, **(common | MODELS.get(name, {}) | more))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1.5 / weight.shape[1] ** 0.5)
    return model


def prompts(padded=True):
    ids = torch.randint(3, 96, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        for row, pads in enumerate((0, 4, 9)):
            ids[row, :pads], mask[row, :pads] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def run(model, inputs, cache=None, **more):
    options = {"max_new_tokens": 12, "do_sample": False} | more
    return model.generate(
        **inputs, **({} if cache is None else {"past_key_values": cache}), **options
    )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_those_of_transformers(name, padded):
    model = make(name)
    expected = run(model, prompts(padded))
    for kind in ("contiguous", "windowed"):
        assert torch.equal(run(model, prompts(padded), LabCache(model, kind)), expected)
    model.set_attn_implementation("sdpa")
    assert torch.equal(run(model, prompts(padded)), expected)


@pytest.mark.parametrize("kind", ["contiguous", "windowed"])
def test_beams_reorder_and_drafts_crop(kind):
    model = make("llama")
    beams = run(model, prompts(), num_beams=3, max_new_tokens=8)
    assert torch.equal(
        run(model, prompts(), LabCache(model, kind), num_beams=3, max_new_tokens=8), beams
    )
    model.set_attn_implementation("sdpa")
    one = {
        k: v[:1].repeat(1, 3) for k, v in prompts(False).items()
    }  # a repeated prompt, so that n-grams are found
    expected = run(model, one)
    assert torch.equal(run(model, one, LabCache(model, kind), prompt_lookup_num_tokens=3), expected)


def test_the_quantized_cache_is_near_and_small():
    model = make("llama", hidden_size=128, head_dim=64, num_attention_heads=4)
    ids = torch.randint(3, 96, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(ids).logits
        errors = {}
        for kind in ("contiguous", "int8", "int4", "int2"):
            cache = LabCache(model, kind)
            errors[kind] = (
                model(ids, past_key_values=cache).logits - expected
            ).abs().mean() / expected.abs().mean()
            assert cache.get_seq_length() == 200 == cache.cache.length
            if kind == "int8":
                assert cache.cache.nbytes_used() == kv_bytes(kv_shape(model), 200, 2, "int8")
            model.set_attn_implementation("sdpa")
    assert (
        errors["contiguous"] < 1e-5 < errors["int8"] < 0.03
        and errors["int8"] < errors["int4"] < errors["int2"]
    )


def test_an_imposed_window_is_a_band_also_for_a_prompt_longer_than_it():
    model, windowed = make("llama"), make("mistral", sliding_window=4)
    windowed.load_state_dict(model.state_dict())
    expected = run(windowed, prompts())
    assert torch.equal(run(model, prompts(), LabCache(model, windowed_cache(4))), expected)


@pytest.mark.parametrize(("amount", "left"), [(-5, 0), (-3, 0), (-1, 2), (0, 3), (2, 2), (9, 3)])
def test_crop_means_the_same_in_every_version(amount, left):
    model = make("llama")
    for maker in ("contiguous", quantized_cache("int8")):
        cache = LabCache(model, maker)
        with torch.inference_mode():
            model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
            cache.crop(amount)
            assert cache.get_seq_length() == cache.cache.length == left
            after = model(torch.tensor([[8]]), past_key_values=cache).logits[0, -1]
            whole = torch.tensor([[5, 6, 7][:left] + [8]])
            expected = model(whole, past_key_values=LabCache(model)).logits[0, -1]
        torch.testing.assert_close(
            after, expected, atol=0.05 if maker != "contiguous" else 1e-4, rtol=0
        )


REJECTED = {
    "t5": ({"d_model": 32, "num_layers": 1, "d_ff": 32, "d_kv": 8, "num_heads": 4}, "encoder"),
    "bloom": ({"n_layer": 1, "n_head": 4}, "fixed attention|ALiBi"),
    "mamba": ({"state_size": 4, "num_hidden_layers": 1}, "mamba"),
    "gemma2": ({}, "caps"),
    "gpt_oss": ({"num_local_experts": 2, "num_experts_per_tok": 1}, "sink"),
    "deepseek_v3": (
        {
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 1,
            "first_k_dense_replace": 2,
            "n_group": 1,
            "topk_group": 1,
        },
        "MLA",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_unsupported_architectures_are_errors_with_their_name(name):
    more, words = REJECTED[name]
    config = transformers.AutoConfig.for_model(
        name, **({k: v for k, v in COMMON.items() if k != "head_dim"} | more)
    )
    auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    with pytest.raises(BadRequest, match=name) as error:
        LabCache(model)
    assert re.search(words, str(error.value))


def test_impossible_requests_raise():
    model = make("llama")
    assert unsupported_reason(model) is None
    with pytest.raises(BadRequest, match="none"):
        LabCache(model, "none")
    inputs = prompts()
    inputs["attention_mask"][0, 5] = 0
    with pytest.raises(BadRequest, match="pad on the left"):
        run(model, inputs, LabCache(model))
    with pytest.raises(BadRequest, match="needs a LabCache"):
        run(model, prompts())


@pytest.mark.parametrize(
    "given", [None, "llama", transformers.LlamaConfig()], ids=["nothing", "a name", "a config"]
)
def test_anything_but_a_model_of_transformers_is_an_error(given):
    with pytest.raises(BadRequest, match="model of transformers"):
        LabCache(given)


def test_a_model_that_does_not_use_its_cache_is_an_error():
    model, other = make("llama"), make("llama")
    with pytest.raises(BadRequest, match="did not attend through this cache"):
        run(other, prompts(), LabCache(model))
    cache = LabCache(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(BadRequest, match="did not attend through this cache"):
        run(model, prompts(), cache)
    cache = LabCache(model)
    cache.update(torch.zeros(3, 2, 1, 8), torch.zeros(3, 2, 1, 8), 0)  # a pass that broke off
    cache.reset()
    assert run(model, prompts(), cache).shape == (3, 23)


def test_keys_of_another_shape_than_the_cache_are_errors():
    model = make("llama")
    cache = LabCache(model, "int8")
    run(model, prompts(), cache)
    longer = {name: torch.cat([t, t, t], 1)[:2] for name, t in prompts(False).items()}
    with pytest.raises(BadRequest, match=r"shape \(2, 2, 8\) for a cache of \(3, 2, 8\)"):
        run(model, longer, cache)
    odd = make("gpt_neox")  # a config with a key that this architecture does not read
    with pytest.raises(BadRequest, match=r"4, 8\) for a cache of \(\d, 2, 8\)"):
        run(odd, prompts(), LabCache(odd))


@pytest.mark.parametrize("kind", ["int8", "int4", "paged", "observed"])
def test_beams_sampling_and_drafts_run_over_every_kind(kind):
    model = make("llama")
    for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        rows = 3 * options.get("num_return_sequences", 1)
        assert run(model, prompts(), LabCache(model, kind), max_new_tokens=4, **options).shape == (
            rows,
            15,
        )
    one = {k: v[:1].repeat(1, 3) for k, v in prompts(False).items()}
    assert run(
        model, one, LabCache(model, kind), prompt_lookup_num_tokens=3, max_new_tokens=6
    ).shape == (1, 39)
