"""Steps of fixed shape give the tokens of plain decoding, with graphs on CUDA and without on a CPU."""

import pytest
import torch

from labkit.cache import ContiguousCache
from labkit.errors import BadRequest
from labkit.generate import generate
from labkit.lab.cuda.static_cache import StaticCache
from labkit.lab.cuda.static_decoder import StaticDecoder
from labkit.model.tiny import tiny_model
from labkit.plan.kv import KVShape

MODELS = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "window": ("mistral", dict(windows=(5, None))),
    "gemma": ("gemma3_text", {}),
}


def prompts(rows, seed=0):
    lengths = torch.randint(1, 60, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [
        torch.randint(3, 96, (n,), generator=torch.Generator().manual_seed(seed + n)).tolist()
        for n in lengths
    ]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_are_those_of_plain_decoding(device, name, rows):
    """Use rows of unequal length that cross a span (128), with and without an end token."""
    architecture, options = MODELS[name]
    model = tiny_model(architecture, **options).to(device)
    asked = prompts(rows)
    fast = StaticDecoder(model, rows, capacity=256)
    plain = generate(model, asked, max_new_tokens=100, end_ids=())
    got = fast.generate(asked, max_new_tokens=100, end_ids=(), look=7)
    assert [row.tokens for row in got] == [row.tokens for row in plain]
    assert len(got[0].token_times_s) == 100 and got[0].stop_reason == "length"
    end = plain[0].tokens[40]
    again = fast.generate(asked, max_new_tokens=100, end_ids=(end,))
    assert [row.tokens for row in again] == [
        row.tokens for row in generate(model, asked, max_new_tokens=100, end_ids=(end,))
    ]
    assert again[0].stop_reason == "end_token"


def test_a_word_after_the_prompt_keeps_its_leading_space(device):
    """A tokenizer drops the first space of a text; the prompt starts the text, not the answer."""

    class Sayer:
        special_ids = (0, 1, 2)

        def decode(self, ids, skip_special=True, continues=False):
            words = " ".join(map(str, ids))
            return f" {words}" if continues else words

    model = tiny_model().to(device)
    model.tokenizer = Sayer()
    for prompt in ([3, 4, 5], [1]):  # a text, and BOS alone
        plain = generate(model, [prompt], max_new_tokens=6, end_ids=())
        (got,) = StaticDecoder(model, 1, capacity=64).generate(
            [prompt], max_new_tokens=6, end_ids=()
        )
        assert got.text == plain[0].text and got.text.startswith(" ") == (prompt != [1])


def test_fixed_steps_of_the_cache_equal_a_contiguous_one(device):
    shape, generator = KVShape.uniform(2, 2, 8, window=6), torch.Generator().manual_seed(0)
    fixed, plain = (kind(shape, 2, 32, device=device) for kind in (StaticCache, ContiguousCache))
    draw = lambda *size: torch.randn(*size, generator=generator).to(device)  # noqa: E731
    for cache in (fixed, plain):
        cache.advance(5, [5, 2])
    for layer in range(2):
        keys, values = draw(2, 2, 5, 8), draw(2, 2, 5, 8)
        for cache in (fixed, plain):
            cache.append(layer, keys, values)
    with fixed.fixed(32):
        for _ in range(9):
            positions = fixed.advance(1)
            assert positions.tolist() == plain.advance(1).tolist()
            for layer in range(2):
                keys, values, queries = draw(2, 2, 1, 8), draw(2, 2, 1, 8), draw(2, 4, 1, 8)
                outs = []
                for cache in (fixed, plain):
                    cache.append(layer, keys, values)
                    outs.append(cache.attend(layer, queries))
                torch.testing.assert_close(*outs)
            fixed.at += 1
    fixed.count(9)
    assert fixed.lengths == plain.lengths == (14, 11)


def test_prompts_that_do_not_fit_raise(device):
    model = tiny_model().to(device)
    with pytest.raises(BadRequest, match="capacity"):
        StaticCache(model.config.kv_shape)
    fast = StaticDecoder(model, 1, capacity=20)
    with pytest.raises(BadRequest, match="20"):
        fast.generate([[3] * 10], max_new_tokens=12)
    assert (
        len(fast.generate([[3] * 10], max_new_tokens=11, end_ids=())[0].tokens) == 11
    )  # uses every slot
    with pytest.raises(BadRequest, match=r"\[1, 1\] tokens.*give 1 prompts"):
        fast.prefill([[3], [4]])


def test_logits_with_nan_raise(device):
    model = tiny_model().to(device)
    model.norm.weight.fill_(float("nan"))
    with pytest.raises(BadRequest, match="NaN"):
        StaticDecoder(model, 1, 64).generate([[3, 4]], max_new_tokens=4)


@pytest.mark.gpu
def test_steps_are_recorded_once_per_span_and_do_not_wait_for_the_device(device):
    model = tiny_model().to(device)
    fast = StaticDecoder(model, 1, capacity=256)
    fast.generate([[3, 4, 5]], max_new_tokens=150, end_ids=())
    assert set(fast._recorded) == {128, 256}
    with torch.cuda.stream(torch.cuda.current_stream(device)):
        torch.cuda.set_sync_debug_mode("error")  # an operation that waits for the device raises
        try:
            fast.cache.rewind(3)
            with fast.cache.fixed(128):
                fast._replay(128)()
        finally:
            torch.cuda.set_sync_debug_mode("default")
