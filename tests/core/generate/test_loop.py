"""Generation against a plain recomputation from the whole text, and every way in which it begins and ends."""

import math
import threading

import pytest
import torch

from labkit.cache import CACHES, EXACT, ContiguousCache, make_cache
from labkit.errors import BadRequest
from labkit.generate import InvalidLogits, Sampling, generate, stream
from labkit.generate import loop as loop_module
from labkit.model.tiny import tiny_model
from labkit.plan.kv import KVShape

PROMPTS = [[5, 6], [7, 8, 9, 10, 11, 12, 13], [3], [2, 2, 40, 2, 41, 2], list(range(30, 60))]
NEVER = ()
SAME = ("none", *EXACT)  # caches whose answer is that of recomputing


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def speaking(model, tokenizer):
    model.tokenizer = tokenizer
    yield model
    model.tokenizer = None


@pytest.fixture
def passes(model):
    """The shape [B, T] of every forward pass that was made."""
    shapes = []
    hook = model.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    yield shapes
    hook.remove()


def plainly(model, prompt, n, end_ids=NEVER):
    """Greedy decoding, the whole text through the model for every token."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        if tokens[-1] in end_ids:
            break
    return tuple(tokens[len(prompt) :])


def cache_of(model, tokens, capacity=64):
    """A cache that holds `tokens`, as somebody else filled it."""
    cache = make_cache("contiguous", model.config.kv_shape, 1, capacity)
    if tokens:
        model(torch.tensor([tokens]), cache)
    return cache


# --- the same tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("cache", SAME)
def test_greedy_equals_recomputing_the_whole_text(architecture, cache):
    model = tiny_model(architecture, seed=1)
    for prompt in PROMPTS:
        assert generate(
            model, prompt, max_new_tokens=24, end_ids=NEVER, cache=cache
        ).tokens == plainly(model, prompt, 24)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_greedy_equals_transformers(architecture):
    transformers = pytest.importorskip("transformers")
    from labkit.model.files.names import to_hf_state_dict

    model = tiny_model(architecture, seed=2)
    settings = model.config.to_hf()
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.load_state_dict(to_hf_state_dict(model))
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert generate(model, prompt, max_new_tokens=24, end_ids=NEVER).tokens == tuple(
            out[0, len(prompt) :].tolist()
        )


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 29, 30, 64])
def test_prefill_in_chunks_changes_nothing(model, chunk):
    expected = generate(model, PROMPTS, max_new_tokens=12, end_ids=NEVER)
    chunked = generate(model, PROMPTS, max_new_tokens=12, end_ids=NEVER, prefill_chunk=chunk)
    assert [c.tokens for c in chunked] == [c.tokens for c in expected]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=1.5, top_p=0.95, repetition_penalty=1.2, seed=3)],
    ids=["greedy", "sampled"],
)
def test_a_batch_of_unequal_prompts_equals_each_prompt_alone(model, cache, sampling):
    # pad is eos here (2), and one prompt holds real ones, which must stay visible
    assert model.config.pad_id in model.config.eos_ids
    together = generate(model, PROMPTS, max_new_tokens=30, sampling=sampling, cache=cache)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, together)):
        own = Sampling(**{**vars(sampling), "seed": sampling.seed + row})
        alone = generate(model, prompt, max_new_tokens=30, sampling=own, cache=cache)
        assert (completion.prompt, completion.tokens, completion.stop_reason) == (
            tuple(prompt),
            alone.tokens,
            alone.stop_reason,
        )


def test_a_real_end_token_inside_a_prompt_is_seen(model):
    prompt = PROMPTS[3]
    without = [token for token in prompt if token != 2]
    assert plainly(model, prompt, 12) != plainly(model, without, 12)
    assert generate(model, [prompt, PROMPTS[4]], max_new_tokens=12, end_ids=NEVER)[
        0
    ].tokens == plainly(model, prompt, 12)


@pytest.mark.parametrize("cache", SAME)
def test_rows_that_end_leave_the_batch_and_the_others_do_not_notice(model, passes, cache):
    alone = [plainly(model, prompt, 20) for prompt in PROMPTS]
    ends = {alone[0][3], alone[2][7]}
    expected = [plainly(model, prompt, 20, ends) for prompt in PROMPTS]
    passes.clear()
    together = generate(model, PROMPTS, max_new_tokens=20, end_ids=sorted(ends), cache=cache)
    assert [c.tokens for c in together] == expected
    lengths = [len(tokens) for tokens in expected]
    assert len(set(lengths)) > 1
    assert [shape[0] for shape in passes] == [
        sum(length > step for length in lengths) for step in range(max(lengths))
    ]


def by_hand(model, prompt, n, *, repetition, frequency, presence, min_new, end_ids, bad_words):
    """Greedy with penalties, written out on Python lists, everything counted again from the whole text."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < n:
        scores = model(torch.tensor([tokens]))[0, -1].tolist()
        new = tokens[len(prompt) :]
        for token in range(len(scores)):
            if token in tokens:
                scores[token] = (
                    scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
                )
            scores[token] -= frequency * new.count(token) + presence * (token in new)
            if token in end_ids and len(new) < min_new:
                scores[token] = -math.inf
            for word in bad_words:
                if word[-1] == token and tokens[len(tokens) - len(word) + 1 :] == word[:-1]:
                    scores[token] = -math.inf
        tokens.append(max(range(len(scores)), key=lambda token: (scores[token], -token)))
        if tokens[-1] in end_ids:
            break
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition": 1.4},
        {"repetition": 0.8},
        {"frequency": 0.7},
        {"presence": 1.5},
        {"min_new": 9},
        {"bad_words": 2},
        {"repetition": 1.1, "frequency": 0.3, "presence": 0.2, "min_new": 5, "bad_words": 3},
    ],
    ids=str,
)
def test_penalties_equal_counting_again_from_the_whole_text(model, settings):
    for prompt in PROMPTS:
        plain = plainly(model, prompt, 20)
        values = {
            "repetition": 1.0,
            "frequency": 0.0,
            "presence": 0.0,
            "min_new": 0,
            "bad_words": 0,
        } | settings
        size = values["bad_words"]
        values["bad_words"] = (
            [list(plain[:size]), [*prompt[-1:], plain[0]], [plain[5]]] if size else []
        )
        values["end_ids"] = {plain[4]}
        expected = by_hand(model, prompt, 20, **values)
        sampling = Sampling(
            repetition_penalty=values["repetition"],
            frequency_penalty=values["frequency"],
            presence_penalty=values["presence"],
            min_new_tokens=values["min_new"],
            bad_words=values["bad_words"],
        )
        for cache in SAME:
            ours = generate(
                model,
                prompt,
                max_new_tokens=20,
                sampling=sampling,
                end_ids=values["end_ids"],
                cache=cache,
            )
            assert ours.tokens == expected


def test_seeds(model):
    hot = lambda seed: Sampling(temperature=2.0, seed=seed)  # noqa: E731
    a, b = (
        generate(model, [[5, 6]] * 3, max_new_tokens=12, sampling=hot(0), end_ids=NEVER)
        for _ in range(2)
    )
    assert [c.tokens for c in a] == [c.tokens for c in b]
    assert len({c.tokens for c in a}) == 3  # row r uses seed + r
    assert (
        generate(model, [5, 6], max_new_tokens=12, sampling=hot(2), end_ids=NEVER).tokens
        == a[2].tokens
    )


# --- how it ends ---------------------------------------------------------------------------------------------------


def test_any_of_several_end_tokens_ends_it_and_is_kept(model):
    plain = plainly(model, [5, 6], 20)
    for ends in ([plain[6]], [plain[6], 95], [94, plain[6]], plain[6], torch.tensor([plain[6]])):
        completion = generate(model, [5, 6], max_new_tokens=20, end_ids=ends)
        assert completion.tokens == plain[: plain.index(plain[6]) + 1]
        assert completion.stop_reason == "end_token"


def test_the_models_own_end_tokens_are_the_default_and_none_is_possible():
    plain = plainly(tiny_model(), [5, 6], 20)
    model = tiny_model(eos_ids=(plain[3],))
    assert generate(model, [5, 6], max_new_tokens=20).tokens == plain[: plain.index(plain[3]) + 1]
    assert generate(model, [5, 6], max_new_tokens=20, end_ids=()).tokens == plain
    assert generate(tiny_model(eos_ids=()), [5, 6], max_new_tokens=20).tokens == plain


def test_an_end_token_at_the_last_place_of_the_budget_is_the_reason(model):
    plain = plainly(model, [5, 6], 20)
    at = plain.index(plain[6])
    assert (
        generate(model, [5, 6], max_new_tokens=at + 1, end_ids=[plain[6]]).stop_reason
        == "end_token"
    )
    assert generate(model, [5, 6], max_new_tokens=at, end_ids=[plain[6]]).stop_reason == "length"


@pytest.mark.parametrize("n", [0, 1, 2, 17])
def test_the_budget_is_exact(model, n):
    completion = generate(model, [5, 6], max_new_tokens=n, end_ids=NEVER)
    assert (completion.tokens, completion.stop_reason) == (plainly(model, [5, 6], n), "length")


def test_no_budget_makes_no_token_and_no_pass_and_leaves_the_cache(model, passes):
    cache = cache_of(model, [5, 6])
    content = [t.clone() for t in cache.keys + cache.values]
    passes.clear()
    completion = generate(model, [5, 6], max_new_tokens=0, cache=cache)
    assert (completion.tokens, completion.stop_reason, completion.ttft_s, completion.tpot_s) == (
        (),
        "length",
        None,
        None,
    )
    assert passes == [] and cache.lengths == (2,)
    assert all(map(torch.equal, content, cache.keys + cache.values))
    assert list(stream(model, [5, 6], max_new_tokens=0)) == []


@pytest.mark.parametrize("cache", SAME)
def test_rows_may_have_budgets_of_their_own(model, cache):
    budgets = [0, 3, 12, 1, 7]
    together = generate(model, PROMPTS, max_new_tokens=budgets, end_ids=NEVER, cache=cache)
    assert [c.tokens for c in together] == [plainly(model, p, n) for p, n in zip(PROMPTS, budgets)]


def test_a_prompt_may_fill_the_context_and_no_more():
    model = tiny_model(max_positions=16)
    calls = []
    model.register_forward_pre_hook(lambda module, args: calls.append(1))
    prompt = list(range(3, 19))
    assert generate(model, prompt, max_new_tokens=0).tokens == ()
    assert len(generate(model, prompt[:10], max_new_tokens=6, end_ids=NEVER).tokens) == 6
    calls.clear()
    for size, n in ((16, 1), (10, 7), (17, 0), (1, 16)):
        for prompts in ([*prompt, 3][:size], [[5], [*prompt, 3][:size]]):
            with pytest.raises(BadRequest, match="context of 16"):
                generate(model, prompts, max_new_tokens=n)
            with pytest.raises(BadRequest, match="context of 16"):
                stream(model, prompts, max_new_tokens=n)  # at the call, not at the first token
    assert calls == []


@pytest.mark.parametrize("empty", ["", []], ids=["text", "ids"])
def test_an_empty_prompt_begins_with_bos_or_is_an_error(tokenizer, empty):
    with_bos, without = tiny_model(bos_id=1), tiny_model(bos_id=None)
    with_bos.tokenizer = without.tokenizer = tokenizer
    expected = plainly(with_bos, [1], 10)
    completion = generate(with_bos, empty, max_new_tokens=10, end_ids=NEVER)
    assert (completion.prompt, completion.tokens) == ((1,), expected)
    assert [c.tokens for c in generate(with_bos, [empty], max_new_tokens=10, end_ids=NEVER)] == [
        expected
    ]
    assert (
        generate(with_bos, [[5, 6], empty], max_new_tokens=10, end_ids=NEVER)[1].tokens == expected
    )
    for prompts in (empty, [empty], [[5, 6], empty]):
        with pytest.raises(BadRequest, match="no BOS"):
            generate(without, prompts)


@pytest.mark.parametrize("how", ["event", "function"])
def test_cancelling_half_way(model, how):
    event, seen = threading.Event(), []

    def on_token(token):
        seen.append(token)
        if len(seen) == 3:
            event.set()

    cache = cache_of(model, [5])
    completion = generate(
        model,
        [5, 6],
        max_new_tokens=20,
        end_ids=NEVER,
        on_token=on_token,
        cache=cache,
        cancel=event if how == "event" else event.is_set,
    )
    plain = plainly(model, [5, 6], 20)
    assert (completion.tokens, completion.stop_reason) == (plain[:3], "cancelled")
    assert [t.id for t in seen] == [*plain[:3], None] and seen[-1].stop_reason == "cancelled"
    # what the cache holds is good to go on with
    rest = generate(model, [5, 6, *plain[:3]], max_new_tokens=17, end_ids=NEVER, cache=cache)
    assert rest.tokens == plain[3:]


def test_cancelled_before_it_begins_or_between_chunks(model, passes):
    completion = generate(model, [5, 6], cancel=lambda: True)
    assert (completion.tokens, completion.stop_reason, passes) == ((), "cancelled", [])
    answers = iter([False, False, True])
    completions = generate(model, PROMPTS, prefill_chunk=4, cancel=lambda: next(answers))
    assert [(c.tokens, c.stop_reason) for c in completions] == [((), "cancelled")] * len(PROMPTS)
    assert len(passes) == 2


def test_leaving_a_stream_early_costs_no_further_pass(model, passes):
    tokens = stream(model, [5, 6], max_new_tokens=20, end_ids=NEVER)
    assert [next(tokens).id, next(tokens).id] == list(plainly(model, [5, 6], 2))
    made = len(passes)
    tokens.close()
    assert len(passes) == made


def test_streaming_does_not_leak_inference_mode(model):
    for _ in stream(model, [5, 6], max_new_tokens=2, end_ids=NEVER):
        assert not torch.is_inference_mode_enabled()


# --- text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(), ("a",), "é", ("END", "b", "zz"), ("\n", "th")], ids=repr)
@pytest.mark.parametrize("batch", [1, 4])
def test_text_stops_and_streams_as_the_whole_text_says(speaking, tokenizer, stop, batch):
    strings = (stop,) if isinstance(stop, str) else stop
    reasons = set()
    for seed in range(4):
        sampling = Sampling(temperature=3.0, seed=100 * seed)
        prompts = [[5 + row] * (row + 1) for row in range(batch)]
        free = generate(speaking, prompts, max_new_tokens=24, sampling=sampling)
        texts, last = [""] * batch, [None] * batch
        for token in stream(speaking, prompts, max_new_tokens=24, sampling=sampling, stop=stop):
            texts[token.row] += token.text
            last[token.row] = token.stop_reason
        for row, completion in enumerate(
            generate(speaking, prompts, max_new_tokens=24, sampling=sampling, stop=stop)
        ):
            tokens, reason = free[row].tokens, free[row].stop_reason
            for n in range(
                1, len(tokens) + 1
            ):  # plainly: the first token with which a stop string is there
                text = tokenizer.decode(tokens[:n])
                if any(s in text for s in strings):
                    tokens, reason = tokens[:n], "stop_string"
                    break
            text = tokenizer.decode(tokens)
            text = text[: min([text.find(s) for s in strings if s in text], default=len(text))]
            assert (completion.tokens, completion.stop_reason, completion.text) == (
                tokens,
                reason,
                text,
            )
            assert (texts[row], last[row]) == (text, reason)
            reasons.add(reason)
    assert len(reasons) > 1 or not strings


def test_text_without_end_token_and_without_special_tokens(speaking, tokenizer):
    plain = plainly(speaking, [5, 6], 20)
    completion = generate(speaking, [5, 6], max_new_tokens=20, end_ids=[plain[6]])
    assert completion.text == tokenizer.decode(completion.tokens[:-1])
    streamed = "".join(
        token.text for token in stream(speaking, [5, 6], max_new_tokens=20, end_ids=[plain[6]])
    )
    assert streamed == completion.text


def test_a_cancelled_row_gives_the_rest_of_its_text(speaking, tokenizer):
    plain = plainly(speaking, [5, 6], 4)
    tail = tokenizer.decode(plain)[-1:]
    calls = iter([False] * 4 + [True])
    tokens = list(
        stream(
            speaking,
            [5, 6],
            max_new_tokens=9,
            end_ids=NEVER,
            stop=tail + "\0",
            cancel=lambda: next(calls),
        )
    )
    assert "".join(token.text for token in tokens) == tokenizer.decode(plain)
    assert tokens[-1] == (type(tokens[-1])(None, tail, 0, "cancelled"))


def test_text_prompts(speaking, tokenizer):
    by_ids = generate(speaking, tokenizer.encode("the END"), max_new_tokens=5, end_ids=NEVER)
    assert generate(speaking, "the END", max_new_tokens=5, end_ids=NEVER).tokens == by_ids.tokens
    assert (
        generate(speaking, ["the END", [5]], max_new_tokens=5, end_ids=NEVER)[0].tokens
        == by_ids.tokens
    )


def test_without_a_tokenizer_there_is_no_text_but_tokens(model):
    assert generate(model, [5, 6], max_new_tokens=2).text is None
    assert [token.text for token in stream(model, [5, 6], max_new_tokens=2, end_ids=NEVER)] == [
        None,
        None,
    ]


# --- a given cache -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", range(8))
@pytest.mark.parametrize("chunk", [None, 3])
def test_a_cache_may_hold_any_beginning_of_the_prompt_even_all_of_it(model, passes, held, chunk):
    prompt = PROMPTS[1]
    cache = cache_of(model, prompt[:held])
    passes.clear()
    completion = generate(
        model, prompt, max_new_tokens=10, end_ids=NEVER, cache=cache, prefill_chunk=chunk
    )
    fed = sum(T for _, T in passes) - 9
    assert completion.tokens == plainly(model, prompt, 10)
    assert fed == max(
        len(prompt) - held, 1
    )  # nothing is computed twice; one token is always left to compute
    assert cache.lengths == (len(prompt) + 9,)  # all but the last token


def test_a_given_batch_cache_keeps_its_rows_when_some_end_early(model):
    prompts = PROMPTS[:3]
    cache = make_cache("contiguous", model.config.kv_shape, 3, 64)
    model(
        torch.tensor([p[:1] for p in prompts]), cache
    )  # row 2's prompt is held entirely, the others in part
    plain = [plainly(model, p, 20) for p in prompts]
    ends = {plain[0][3]}
    together = generate(model, prompts, max_new_tokens=[20, 20, 0], end_ids=ends, cache=cache)
    expected = [plainly(model, p, n, ends) for p, n in zip(prompts, (20, 20, 0))]
    assert [c.tokens for c in together] == expected
    assert cache.batch == 3
    assert cache.lengths == tuple(
        len(p) + len(t) - 1 if t else 1 for p, t in zip(prompts, expected)
    )
    again = generate(
        model,
        [[*p, *t] for p, t in zip(prompts, expected)],
        max_new_tokens=5,
        end_ids=NEVER,
        cache=cache,
    )
    assert [c.tokens for c in again] == [
        plainly(model, [*p, *t], 5) for p, t in zip(prompts, expected)
    ]


def test_a_conversation_goes_on_in_the_same_cache(model, passes):
    cache, text = cache_of(model, [], 200), [5, 6]
    for question in ([7, 8], [9], [10, 11, 12]):
        text += question
        passes.clear()
        answer = generate(model, text, max_new_tokens=6, end_ids=NEVER, cache=cache).tokens
        assert answer == plainly(model, text, 6)
        assert passes[0][1] <= len(question) + 2
        text += answer


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (lambda m: cache_of(m, [5, 6, 7]), "has 3 tokens"),
        (lambda m: make_cache("contiguous", m.config.kv_shape, 2, 64), "2 rows for 1 prompts"),
        (lambda m: make_cache("contiguous", KVShape.uniform(2, 4, 8), 1, 64), "other layers"),
        (lambda m: make_cache("contiguous", KVShape.uniform(3, 2, 8), 1, 64), "other layers"),
        (lambda m: cache_of(m, [5], capacity=10), "capacity of 10"),
    ],
)
def test_a_given_cache_that_does_not_fit_is_an_error_and_is_unchanged(model, passes, given, why):
    cache = given(model)
    lengths = cache.lengths
    passes.clear()
    with pytest.raises(BadRequest, match=why):
        generate(model, [5, 6], max_new_tokens=10, cache=cache)
    assert cache.lengths == lengths and passes == []


def test_a_cache_of_exactly_the_needed_capacity_suffices(model):
    cache = cache_of(model, [], capacity=11)
    assert generate(model, [5, 6], max_new_tokens=10, end_ids=NEVER, cache=cache).tokens == plainly(
        model, [5, 6], 10
    )


def test_a_function_may_make_the_cache(model):
    made = []

    def factory(shape, **options):
        made.append(ContiguousCache(shape, **options))
        return made[-1]

    generate(model, PROMPTS[:2], max_new_tokens=4, end_ids=NEVER, cache=factory)
    assert [cache.lengths for cache in made] == [(2 + 3, 7 + 3)]


def test_a_model_that_fails_half_way_leaves_the_cache_as_before_that_pass(model):
    cache, calls = cache_of(model, [5]), []

    def fail(module, args):
        calls.append(cache.lengths)
        if len(calls) == 3:
            raise RuntimeError("out of memory")

    hook = model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            generate(model, [5, 6], max_new_tokens=10, end_ids=NEVER, cache=cache)
    finally:
        hook.remove()
    assert calls[-1] == (4,) and cache.lengths == (3,)
    plain = plainly(model, [5, 6], 10)
    assert (
        generate(model, [5, 6, plain[0]], max_new_tokens=9, end_ids=NEVER, cache=cache).tokens
        == plain[1:]
    )


# --- requests that cannot be carried out ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"prompts": "text"}, "no tokenizer"),
        ({"prompts": [[5], "text"]}, "no tokenizer"),
        ({"prompts": [96]}, "0 to 95"),
        ({"prompts": [-1]}, "0 to 95"),
        ({"prompts": [[5], [1.5]]}, "whole number"),
        ({"max_new_tokens": -1}, "at least 0"),
        ({"max_new_tokens": 1.5}, "whole number"),
        ({"max_new_tokens": None}, "whole number"),
        ({"max_new_tokens": [1, 2]}, "2 numbers for 1"),
        ({"end_ids": [96]}, "0 to 95"),
        ({"end_ids": ["a"]}, "whole"),
        ({"stop": "x"}, "no tokenizer"),
        ({"stop": [""]}, "at least one character"),
        ({"cache": "contigous"}, "choose one"),
        ({"sampling": {"temperature": 1}}, "Sampling"),
        ({"sampling": Sampling(bad_words=[[96]])}, "0 to 95"),
        ({"cancel": 3}, "Event"),
        ({"prefill_chunk": 0}, "at least 1"),
        ({"prefill_chunk": 2, "cache": "none"}, "cache"),
        ({"prompts": 5}, "prompt is"),
        ({"prompts": None}, "prompt is"),
        ({"prompts": [None]}, "Prompt 0"),
        ({"cache": 5}, "choose one"),
        ({"cache": None}, "choose one"),
        ({"end_ids": "ab"}, "whole"),
        ({"end_ids": 1.5}, "whole"),
        ({"end_ids": [[5]]}, "whole"),
    ],
    ids=str,
)
def test_bad_requests_are_errors_of_one_line_before_any_work(model, passes, changes, why):
    request = {"prompts": [5, 6], "max_new_tokens": 3} | changes
    for call in (generate, stream):
        with pytest.raises(BadRequest, match=why) as refused:
            call(model, request["prompts"], **{k: v for k, v in request.items() if k != "prompts"})
        assert str(refused.value).endswith(".") and "\n" not in str(refused.value)
    assert passes == []


def test_logits_that_name_no_token_are_an_error_of_their_own_type():
    model = tiny_model()
    model.norm.weight.fill_(float("nan"))
    for sampling in (Sampling(), Sampling(temperature=1)):
        with pytest.raises(InvalidLogits):
            generate(model, [5, 6], sampling=sampling)


# --- time ------------------------------------------------------------------------------------------------------------


def test_times_are_read_when_a_token_is_known(model, monkeypatch):
    clock, events = iter(range(100)), []
    monkeypatch.setattr(
        loop_module, "perf_counter", lambda: events.append("clock") or float(next(clock))
    )
    monkeypatch.setattr(loop_module, "synchronize", lambda device: events.append("synchronise"))
    hook = model.register_forward_pre_hook(lambda module, args: events.append("pass"))
    completion = generate(model, [5, 6], max_new_tokens=4, end_ids=NEVER)
    hook.remove()
    assert events == ["synchronise", "clock", *["pass", "clock"] * 4]
    assert completion.token_times_s == (1, 2, 3, 4)
    assert (completion.ttft_s, completion.tpot_s) == (1, 1)
    one = generate(model, [5, 6], max_new_tokens=1, end_ids=NEVER)
    assert one.ttft_s is not None and one.tpot_s is None


def test_on_token_must_be_callable(model, passes):
    with pytest.raises(BadRequest, match="on_token is 5"):
        generate(model, [5, 6], max_new_tokens=3, on_token=5)
    assert passes == []
