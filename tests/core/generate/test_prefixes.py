"""Contiguous, paged, forked, prefix hit and prefix miss: one answer, greedy and in float32."""

import pytest

from labkit.cache.paged.cache import PagedCache, paged_cache
from labkit.cache.paged.pool import PagePool
from labkit.cache.prefix.store import PrefixStore
from labkit.errors import BadRequest
from labkit.generate import generate
from labkit.model.fingerprint import fingerprint
from labkit.model.tiny import tiny_model

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3_text"]
SYSTEM = [5 + i % 80 for i in range(37)]
QUESTIONS = [
    [*SYSTEM, 11, 12, 13],
    [*SYSTEM, 40, 41, 42, 43, 44, 45, 46],
    [*SYSTEM[:20], 50],
    [7, 8, 9],
]


def served(model, blocks=400, **options):
    """A store over a pool for this model, and the view of one tenant."""
    pool = PagePool(model.config.kv_shape, blocks, 4, model.dtype)
    store = PrefixStore(pool, blocks * pool.block_bytes, **options)
    return store, store.open("a", "", fingerprint(model))


def tokens_of(completions):
    return [completion.tokens for completion in completions]


def all_ways(model, questions, new_tokens, kinds):
    """{way: tokens of every row}, alone and as one batch of unequal rows."""
    options = {"max_new_tokens": new_tokens, "end_ids": ()}
    alone = [generate(model, tokens, **options).tokens for tokens in questions]
    ways = {"contiguous, batch": tokens_of(generate(model, questions, **options))}
    for kind, maker in kinds.items():
        ways[kind] = [
            generate(model, tokens, cache=maker, **options).tokens for tokens in questions
        ]
        ways[f"{kind}, batch"] = tokens_of(generate(model, questions, cache=maker, **options))
    store, view = served(model)
    ways["prefix, batch, all miss"] = tokens_of(
        generate(model, questions, prefixes=view, **options)
    )
    assert (store.counters.hits, store.counters.misses) == (0, len(questions))
    ways["prefix, batch, all hit"] = tokens_of(generate(model, questions, prefixes=view, **options))
    hits = store.counters.hits
    assert hits == sum(len(tokens) > 4 for tokens in questions)
    ways["prefix, alone"] = [
        generate(model, tokens, prefixes=view, **options).tokens for tokens in questions
    ]
    assert store.counters.hits == 2 * hits
    shared = PagedCache.over(store.pool)
    generate(model, questions[0][:30], cache=shared, max_new_tokens=1)
    forks = [shared.fork() for _ in questions]
    for fork, tokens in zip(forks, questions):
        fork.rewind(
            min(
                30,
                next(
                    (i for i, (a, b) in enumerate(zip(tokens, questions[0])) if a != b), len(tokens)
                ),
            )
        )
    ways["forked"] = [
        generate(model, tokens, cache=fork, **options).tokens
        for fork, tokens in zip(forks, questions)
    ]
    return alone, ways, store


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_way_to_hold_a_prompt_gives_the_same_tokens(architecture):
    alone, ways, store = all_ways(
        tiny_model(architecture),
        QUESTIONS,
        12,
        {"paged": paged_cache(block=4), "paged, blocks of 1": paged_cache(block=1)},
    )
    for way, tokens in ways.items():
        assert tokens == alone, way
    store.forget(tenant="a")
    assert store.pool.free == store.pool.total


@pytest.mark.slow
@pytest.mark.real_model
def test_on_the_default_model_too():
    from labkit.lab.stack.open import load_model

    model = load_model()
    text = "You are a careful assistant. Answer in one short sentence, and say so when you do not know. "
    questions = [
        model.tokenizer.encode(text + more)
        for more in ("What is a page?", "Name three rivers, in order.")
    ]
    questions.append(model.tokenizer.encode("The capital of France is"))
    alone, ways, _ = all_ways(model, questions, 10, {"paged": paged_cache()})
    for way, tokens in ways.items():
        assert tokens == alone, way


def test_what_is_kept_when_the_first_token_is_known_serves_the_next_request_at_once():
    model = tiny_model()
    store, view = served(model)
    seen = []
    generate(
        model,
        QUESTIONS[0],
        prefixes=view,
        max_new_tokens=3,
        on_token=lambda token: seen.append(view.lookup(QUESTIONS[0]).length),
    )
    assert seen[:2] == [0, 39] and len(store.entries()) == 1


def test_rows_of_one_batch_belong_to_their_own_tenants():
    model = tiny_model()
    store, a = served(model)
    b = store.open("b", "", fingerprint(model))
    generate(model, QUESTIONS[0], prefixes=a, max_new_tokens=2)
    before = store.counters.tokens_found
    generate(model, [QUESTIONS[0], QUESTIONS[0]], prefixes=[b, a], max_new_tokens=2)
    assert store.counters.tokens_found - before == 39  # a's row alone
    assert b.lookup(QUESTIONS[0]).length == 39  # and now b has its own
    assert store.forget(tenant="a") == 1 and b.lookup(QUESTIONS[0]).length == 39


def test_documents_are_named_with_the_request_and_revoked():
    model = tiny_model()
    store, view = served(model)
    generate(model, QUESTIONS[0], prefixes=view, documents={"report": 20}, max_new_tokens=2)
    assert store.revoke("report") == 1 and view.lookup(QUESTIONS[0]).length == 20


@pytest.mark.parametrize("failure", ["error", "full", "cancel", "bad request", "on_token"])
def test_a_request_that_fails_keeps_nothing_and_holds_nothing(failure, monkeypatch):
    model = tiny_model()
    store, view = served(model, blocks=12)
    options = {"max_new_tokens": 4}
    if failure == "error":
        monkeypatch.setattr(model, "head", None)
    elif failure == "cancel":
        options["cancel"] = lambda: True
    elif failure == "bad request":
        options["end_ids"] = (99999,)
    elif failure == "on_token":
        options["on_token"] = 5
    prompt = QUESTIONS[0] if failure != "full" else [*range(3, 60)]
    if failure == "cancel":
        assert generate(model, prompt, prefixes=view, **options).stop_reason == "cancelled"
    else:
        with pytest.raises((BadRequest, TypeError)):
            generate(model, prompt, prefixes=view, **options)
    assert store.entries() == [] and store.pool.free == 12


def test_one_view_a_prompt_or_one_for_all():
    model = tiny_model()
    _, view = served(model)
    with pytest.raises(BadRequest, match="one each"):
        generate(model, QUESTIONS[:3], prefixes=[view, view])


def test_a_pool_of_another_model_is_an_error():
    model, other = tiny_model(), tiny_model(num_layers=3)
    store, view = served(other)
    with pytest.raises(BadRequest, match="other layers"):
        generate(model, QUESTIONS[0], prefixes=view)
    with pytest.raises(BadRequest, match="another model"):
        generate(model, QUESTIONS[0], cache=paged_cache(store.pool))


def test_quantised_pages_serve_hits_as_misses():
    """What is read back is what was stored, so a hit gives what the same pages gave to the request that filled them."""
    model = tiny_model()
    pool = PagePool(model.config.kv_shape, 200, 4, kv_format="int8")
    view = PrefixStore(pool, 200 * pool.block_bytes).open("a", "", fingerprint(model))
    options = {"max_new_tokens": 8, "end_ids": ()}
    first = generate(model, QUESTIONS[0], prefixes=view, **options).tokens
    assert first == generate(model, QUESTIONS[0], prefixes=view, **options).tokens
