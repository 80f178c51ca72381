"""The loop against plain decoding with the same cache: every drafter, every cache, every way in which a text ends."""

import threading

import pytest
import torch

from labkit.cache import CACHES, ContiguousCache, make_cache
from labkit.cache.eviction import KeyNorm
from labkit.cache.window import windowed_cache
from labkit.errors import BadRequest
from labkit.generate import DrafterFailed, InvalidLogits, Sampling, generate
from labkit.generate import generate as plain
from labkit.model.tiny import tiny_model
from labkit.speculate import (
    DRAFTERS,
    Draft,
    Drafter,
    DraftModel,
    Lookup,
    make_drafter,
)
from labkit_course.experiments.goodness import goodness_of_fit

PROMPTS = [[5, 6], [7, 8, 9, 10, 11, 12, 13], [3, 4, 3, 4, 3, 4]]
NEVER = ()
CACHE_NAMES, NAMES = (
    sorted(CACHES),
    sorted(set(DRAFTERS) - {"draft", "lookup_draft"}),
)  # trained for one model


def tokens_of(done):
    return [one.tokens for one in done]


# --- the same tokens ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smallest():
    return tiny_model(
        num_layers=4,
        hidden_size=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=16,
        vocab_size=24,
    )


@pytest.fixture(scope="module")
def plainly(smallest):
    """Plain decoding with each cache, once."""
    known = {}

    def of(cache):
        if cache not in known:
            known[cache] = tokens_of(
                plain(smallest, PROMPTS, max_new_tokens=10, end_ids=NEVER, cache=cache)
            )
        return known[cache]

    return of


def check_greedy(smallest, plainly, name, cache, settings):
    drafter, wanted = make_drafter(name, smallest), plainly(cache)
    for length, rows in settings:
        prompts, expected = (
            (PROMPTS, wanted) if rows == 3 else ([PROMPTS[length % 3]], [wanted[length % 3]])
        )
        done = generate(
            smallest,
            prompts,
            drafter=drafter,
            draft_length=length,
            max_new_tokens=10,
            end_ids=NEVER,
            cache=cache,
        )
        assert tokens_of(done) == expected, (length, rows)


@pytest.mark.parametrize("cache", CACHE_NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_plain_decoding(smallest, plainly, name, cache):
    """Two settings of each pair, another two for the next pair; all of them are below."""
    first = CACHE_NAMES.index(cache) + 3 * NAMES.index(name)
    check_greedy(smallest, plainly, name, cache, [(1 + first % 8, 1), (1 + (first + 4) % 8, 3)])


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHE_NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_plain_decoding_at_every_length(smallest, plainly, name, cache):
    check_greedy(
        smallest,
        plainly,
        name,
        cache,
        [(length, rows) for length in range(1, 9) for rows in (1, 3)],
    )


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3_text", "mistral"])
def test_other_architectures_and_their_windows(architecture):
    windows = {"windows": (4, None)} if architecture == "mistral" else {}
    model = tiny_model(architecture, seed=3, **windows)
    for cache in ("contiguous", "windowed", "int8"):
        wanted = tokens_of(plain(model, PROMPTS, max_new_tokens=24, end_ids=NEVER, cache=cache))
        for name in ("layer_skip", "lookup_first"):
            done = generate(
                model,
                PROMPTS,
                drafter=make_drafter(name, model),
                draft_length=4,
                max_new_tokens=24,
                end_ids=NEVER,
                cache=cache,
            )
            assert tokens_of(done) == wanted, (cache, name)


@pytest.mark.parametrize("cache", ["int4", "int2", "nvfp4"])
def test_a_pass_never_packs_what_single_steps_would_have_left(model, near, cache):
    """Across the point where the tail is full and a block of tokens is packed."""
    wanted = plain(model, PROMPTS[1], max_new_tokens=90, end_ids=NEVER, cache=cache).tokens
    done = generate(
        model,
        PROMPTS[1],
        drafter=DraftModel(near),
        draft_length=7,
        max_new_tokens=90,
        end_ids=NEVER,
        cache=cache,
    )
    assert done.tokens == wanted and done.tally.accepted > 10


@pytest.mark.parametrize(
    "maker",
    [
        lambda *a, **k: KeyNorm(*a, **k, budget=12, sinks=1, recent=3),
        windowed_cache(6),
        windowed_cache(6, sinks=2),
    ],
)
def test_a_cache_that_forgets_is_not_asked_to_remember(model, near, maker):
    wanted = tokens_of(plain(model, PROMPTS, max_new_tokens=30, end_ids=NEVER, cache=maker))
    done = generate(
        model,
        PROMPTS,
        drafter=DraftModel(near),
        draft_length=5,
        max_new_tokens=30,
        end_ids=NEVER,
        cache=maker,
    )
    assert tokens_of(done) == wanted


def test_a_windowed_cache_made_for_the_call_can_go_back_as_far_as_is_drafted(scripted):
    model = tiny_model("mistral", seed=3, windows=(4, 4))
    text = plain(model, PROMPTS[1], max_new_tokens=30, end_ids=NEVER, cache="windowed").tokens
    drafter = scripted({tuple(PROMPTS[1]): text}, spoil=[3])
    done = generate(
        model,
        PROMPTS[1],
        drafter=drafter,
        draft_length=6,
        max_new_tokens=30,
        end_ids=NEVER,
        cache="windowed",
    )
    assert done.tokens == text and drafter.limits[:4] == [[6]] * 4


def test_rows_accept_different_counts(model, scripted):
    texts = dict(
        zip(map(tuple, PROMPTS), tokens_of(plain(model, PROMPTS, max_new_tokens=20, end_ids=NEVER)))
    )
    wanted = list(texts.values())
    texts[tuple(PROMPTS[1])] = [0] * 20  # nothing of this row's drafts is right
    done = generate(
        model, PROMPTS, drafter=scripted(texts), draft_length=4, max_new_tokens=20, end_ids=NEVER
    )
    assert tokens_of(done) == wanted
    assert [one.tally.target_passes for one in done] == [4, 19, 4]
    assert done[0].alpha == 1.0 and done[1].alpha < 0.2


@pytest.mark.parametrize("wrong", range(4))
def test_a_wrong_token_anywhere_in_the_draft(model, scripted, wrong):
    prompt = PROMPTS[1]
    wanted = plain(model, prompt, max_new_tokens=16, end_ids=NEVER).tokens
    done = generate(
        model,
        prompt,
        drafter=scripted({tuple(prompt): wanted}, spoil=[wrong]),
        draft_length=4,
        max_new_tokens=16,
        end_ids=NEVER,
    )
    assert done.tokens == wanted
    assert done.tally.examined > done.tally.accepted  # something was refused


# --- budgets, ends, stop strings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("length", [0, 1, 3, 8])
def test_the_budget_is_exact(model, scripted, budget, length):
    prompt = PROMPTS[0]
    text = plain(model, prompt, max_new_tokens=12, end_ids=NEVER).tokens
    drafter = scripted({tuple(prompt): text})
    done = generate(
        model, prompt, drafter=drafter, draft_length=length, max_new_tokens=budget, end_ids=NEVER
    )
    assert done.tokens == text[:budget] and done.stop_reason == "length"
    assert all(limit <= max(0, budget - 2) for limits in drafter.limits for limit in limits)


@pytest.mark.parametrize("place", range(1, 7))
def test_nothing_follows_an_end_token(model, scripted, place):
    """At the beginning, in the middle and at the end of a draft of four, and as the bonus."""
    prompt = next(p for p in ([i, i + 1] for i in range(3, 60)) if _all_differ(model, p))
    text = plain(model, prompt, max_new_tokens=12, end_ids=NEVER).tokens
    cache = model.new_cache(1, 64)
    for ends in (text[place], [90, text[place]], (text[place], text[place])):
        cache.rewind(0)
        done = generate(
            model,
            prompt,
            drafter=scripted({tuple(prompt): text}),
            draft_length=4,
            max_new_tokens=12,
            end_ids=ends,
            cache=cache,
        )
        assert done.tokens == text[: place + 1] and done.stop_reason == "end_token"
        assert (
            cache.length == len(prompt) + place
        )  # all but the last token, as plain decoding leaves it
        assert done.alpha == 1.0 or done.alpha is None


def _all_differ(model, prompt):
    text = plain(model, prompt, max_new_tokens=12, end_ids=NEVER).tokens
    return len(set(text)) == len(text)


def test_a_drafted_end_token_that_the_target_does_not_say(model, scripted):
    prompt = PROMPTS[0]
    text = plain(model, prompt, max_new_tokens=12, end_ids=NEVER).tokens
    drafted = [*text[:2], 2, *text[3:]]
    done = generate(
        model,
        prompt,
        drafter=scripted({tuple(prompt): drafted}),
        draft_length=4,
        max_new_tokens=12,
        end_ids=[2],
    )
    assert done.tokens == text


def test_stop_strings_and_streaming_inside_a_run(speaking, scripted):
    prompt = "hello there"
    whole = plain(speaking, prompt, max_new_tokens=20, end_ids=NEVER)
    drafter = scripted({tuple(speaking.tokenizer.encode(prompt)): whole.tokens})
    for start in range(1, 12, 3):
        stop, pieces = whole.text[start : start + 2], []
        wanted = plain(speaking, prompt, max_new_tokens=20, end_ids=NEVER, stop=stop)
        done = generate(
            speaking,
            prompt,
            drafter=drafter,
            draft_length=6,
            max_new_tokens=20,
            end_ids=NEVER,
            stop=stop,
            on_token=pieces.append,
        )
        assert (done.tokens, done.text, done.stop_reason) == (
            wanted.tokens,
            wanted.text,
            "stop_string",
        )
        assert "".join(piece.text for piece in pieces) == done.text and [
            p.id for p in pieces
        ] == list(done.tokens)


def test_cancelled_between_passes(model, scripted):
    prompt = PROMPTS[0]
    text = plain(model, prompt, max_new_tokens=20, end_ids=NEVER).tokens
    stop, seen = threading.Event(), []

    def on_token(token):
        seen.append(token)
        if len(seen) == 3:
            stop.set()

    done = generate(
        model,
        prompt,
        drafter=scripted({tuple(prompt): text}),
        draft_length=4,
        max_new_tokens=20,
        end_ids=NEVER,
        on_token=on_token,
        cancel=stop,
    )
    assert done.stop_reason == "cancelled" and done.tokens == text[:6]


# --- draft and target in step --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 6))
@pytest.mark.parametrize("prefix", [False, True])
def test_a_draft_that_is_the_target_is_always_right(model, length, prefix):
    """Fifty steps, also where the target found the prompt's beginning in its cache and the draft has seen nothing of it."""
    prompt, cache = PROMPTS[1], "contiguous"
    if prefix:
        cache = make_cache("contiguous", model.config.kv_shape, 1, 512)
        model(torch.tensor([prompt[:-2]]), cache)
    drafter, lengths = DraftModel(model), []
    observe = drafter.observe

    def watched(accepted, hidden=None):
        observe(accepted, hidden)
        lengths.append((drafter.cache.length, accepted[0]))

    drafter.observe = watched
    tokens = 50 * (length + 1) + 1
    done = generate(
        model,
        prompt,
        drafter=drafter,
        draft_length=length,
        max_new_tokens=tokens,
        end_ids=NEVER,
        cache=cache,
    )
    assert done.tally.target_passes == 50 and done.alpha == 1.0 and done.draft_yield == 1.0
    committed = len(prompt) + 1
    for held, accepted in lengths:
        committed += accepted + 1
        # The whole text but its last token; after a run that was kept whole its last drafted token is read with the next.
        assert held == committed - 1 - (accepted == length)


def test_a_shared_cache_is_left_as_it_was(model):
    """The target in fewer bits drafts in the target's own cache."""
    cache = make_cache("contiguous", model.config.kv_shape, 1, 64)
    done = generate(
        model,
        PROMPTS[1],
        drafter=make_drafter("self_quantized", model),
        draft_length=3,
        max_new_tokens=20,
        end_ids=NEVER,
        cache=cache,
    )
    assert done.tokens == plain(model, PROMPTS[1], max_new_tokens=20, end_ids=NEVER).tokens
    again = make_cache("contiguous", model.config.kv_shape, 1, 64)
    model(torch.tensor([[*PROMPTS[1], *done.tokens[:-1]]]), again)
    assert cache.lengths == again.lengths
    for mine, fresh in zip(cache.keys, again.keys):
        torch.testing.assert_close(
            mine[:, :, : cache.length], fresh[:, :, : cache.length], atol=1e-4, rtol=1e-4
        )


def test_hidden_states_come_for_every_token_but_the_last(model):
    class Watching(Lookup):
        wants_hidden = True

        def begin(self, request, rows, hidden=None):
            super().begin(request, rows, hidden)
            self.rows, self.states = list(rows), [list(h) for h in hidden]

        def observe(self, accepted, hidden=None):
            for row, mine, new, count in zip(self.rows, self.states, hidden, accepted):
                assert len(new) == count + 1
                mine.extend(new)
                assert len(mine) == len(row.history) - 1

        def select(self, keep):
            super().select(keep)
            self.check_states()
            self.rows, self.states = [self.rows[i] for i in keep], [self.states[i] for i in keep]

        def check_states(self):
            for row, mine in zip(self.rows, self.states):
                _, wanted = model(torch.tensor([row.history[: len(mine)]]), return_hidden=True)
                torch.testing.assert_close(torch.stack(mine), wanted[0], atol=1e-4, rtol=1e-4)

    for options in ({}, {"prefill_chunk": 2}, {"cache": "none"}):
        drafter = Watching(shortest=1)
        generate(
            model, PROMPTS, drafter=drafter, max_new_tokens=[9, 14, 20], end_ids=NEVER, **options
        )
        drafter.check_states()


# --- sampling ------------------------------------------------------------------------------------------------------


def joint(model, prompt, sampling, width):
    """The exact distribution of the first two tokens [width, width]."""
    from labkit.generate.sampling import probabilities

    first = probabilities(model(torch.tensor([prompt]))[0, -1], sampling)
    out = torch.zeros(width, width, dtype=torch.float64)
    for token in range(width):
        if first[token] > 0:
            text = [*prompt, token]
            out[token] = (
                first[token] * probabilities(model(torch.tensor([text]))[0, -1], sampling).double()
            )
    return out


class GreedyScoredAsSampled(DraftModel):
    """The classic mistake: the likeliest token, with the probabilities that it was not drawn from."""

    def propose(self, rows, limits):
        drafts = super().propose(rows, limits)
        return [
            Draft([int(q.argmax()) for q in d.probabilities], d.probabilities) if d.tokens else d
            for d in drafts
        ]


@pytest.mark.parametrize("kind", ["sampled", "greedy", "wrong"])
def test_sampled_texts_are_as_likely_as_without_drafting(kind):
    model, other = tiny_model(seed=1, vocab_size=8), tiny_model(seed=2, vocab_size=8)
    sampling, prompt, n = Sampling(temperature=1.5, top_k=5, seed=11), [3, 4], 1500
    drafter = {
        "sampled": DraftModel(other),
        "greedy": Lookup(shortest=1),
        "wrong": GreedyScoredAsSampled(other),
    }[kind]
    done = generate(
        model,
        [prompt] * n,
        drafter=drafter,
        draft_length=2,
        max_new_tokens=3,
        end_ids=NEVER,
        sampling=sampling,
    )
    counts = torch.zeros(8, 8, dtype=torch.float64)
    for one in done:
        counts[one.tokens[0], one.tokens[1]] += 1
    fit = goodness_of_fit(
        counts.flatten().tolist(), joint(model, prompt, sampling, 8).flatten().tolist()
    )
    assert (fit.p > 0.01) == (kind != "wrong"), fit


def test_equal_seeds_give_equal_texts_and_rows_their_own(model, near):
    sampling = Sampling(temperature=1.2, top_p=0.9, frequency_penalty=0.5, seed=4)
    options = {
        "drafter": DraftModel(near),
        "max_new_tokens": 16,
        "end_ids": NEVER,
        "sampling": sampling,
    }
    once, again = (tokens_of(generate(model, [PROMPTS[0]] * 3, **options)) for _ in range(2))
    assert once == again and len(set(once)) == 3
    assert generate(model, PROMPTS[0], **options).tokens == once[0]


def test_greedy_with_penalties_equals_plain_decoding(model, near):
    sampling = Sampling(
        repetition_penalty=1.6, frequency_penalty=0.7, min_new_tokens=5, bad_words=[[9], [10, 11]]
    )
    wanted = tokens_of(plain(model, PROMPTS, max_new_tokens=25, sampling=sampling))
    for drafter in (DraftModel(near), Lookup(shortest=1)):
        assert (
            tokens_of(
                generate(model, PROMPTS, drafter=drafter, max_new_tokens=25, sampling=sampling)
            )
            == wanted
        )


# --- what goes wrong -----------------------------------------------------------------------------------------------


class Failing(Lookup):
    name = "failing"

    def __init__(self, where, error):
        super().__init__(shortest=1)
        self.where, self.error, self.calls = where, error, 0

    def propose(self, rows, limits):
        self.calls += 1
        if self.where == "propose" and self.calls == 3:
            raise self.error
        return super().propose(rows, limits)

    def observe(self, accepted, hidden=None):
        if self.where == "observe" and self.calls == 3:
            raise self.error


@pytest.mark.parametrize("where", ["propose", "observe"])
def test_a_drafter_that_raises_half_way(model, where):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    cache = make_cache("contiguous", model.config.kv_shape, 1, 64)
    model(torch.tensor([PROMPTS[1][:4]]), cache)
    with pytest.raises(DrafterFailed, match="failing.*KeyError.*as before"):
        generate(
            model,
            PROMPTS[1],
            drafter=Failing(where, KeyError("x")),
            max_new_tokens=20,
            end_ids=NEVER,
            cache=cache,
        )
    assert cache.lengths == (4,)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    wanted = plain(model, PROMPTS[1], max_new_tokens=20, end_ids=NEVER).tokens
    assert plain(model, PROMPTS[1], max_new_tokens=20, end_ids=NEVER, cache=cache).tokens == wanted


def test_layers_are_left_out_without_a_trace_even_where_the_draft_raises(model):
    drafter = make_drafter("layer_skip", tiny_model(num_layers=5))
    target = tiny_model(num_layers=5)
    drafter = make_drafter("layer_skip", target)
    places, count = [layer.attention.layer for layer in target.layers], len(target.layers)
    wanted = plain(target, PROMPTS[1], max_new_tokens=12, end_ids=NEVER).tokens
    hook = drafter.model.layers[1].mlp.register_forward_hook(
        lambda *_: (_ for _ in ()).throw(RuntimeError("half-way"))
    )
    with pytest.raises(RuntimeError):  # the layer is the target's own, so the target fails as well
        generate(target, PROMPTS[1], drafter=drafter, max_new_tokens=12, end_ids=NEVER)
    hook.remove()
    assert [layer.attention.layer for layer in target.layers] == places and len(
        target.layers
    ) == count
    assert plain(target, PROMPTS[1], max_new_tokens=12, end_ids=NEVER).tokens == wanted


class Rogue(Drafter):
    def __init__(self, draft):
        self.draft = draft

    def propose(self, rows, limits):
        return [self.draft for _ in rows]


@pytest.mark.parametrize(
    "draft", [Draft([5000]), Draft([-1]), Draft([1] * 9), Draft([1], torch.ones(1, 3))]
)
def test_a_draft_that_was_not_asked_for_is_a_typed_error(model, draft):
    cache = make_cache("contiguous", model.config.kv_shape, 1, 64)
    with pytest.raises(ValueError, match="drafter"):
        generate(
            model,
            PROMPTS[0],
            drafter=Rogue(draft),
            draft_length=4,
            max_new_tokens=9,
            end_ids=NEVER,
            cache=cache,
        )
    assert cache.lengths == (0,)


def test_a_target_without_an_answer_is_a_typed_error():
    broken = tiny_model()
    with torch.no_grad():
        broken.norm.weight.fill_(float("nan"))
    with pytest.raises(InvalidLogits):
        generate(broken, PROMPTS[0], drafter=Lookup(), max_new_tokens=5)


@pytest.mark.parametrize(
    "options",
    [
        {"draft_length": -1},
        {"draft_length": 1.5},
        {"draft_length": "often"},
        {"drafter": "oracle"},
        {"drafter": 7},
        {"on_token": 3},
    ],
)
def test_bad_requests_are_errors_before_any_work(model, options):
    with pytest.raises(BadRequest):
        generate(model, PROMPTS[0], **{"drafter": Lookup(), **options})


# --- what is reported ----------------------------------------------------------------------------------------------


def test_counts_and_the_words_for_them(model, scripted):
    """Of drafts of four with the third token wrong, two are kept, three are examined, four are drafted."""
    prompt = PROMPTS[1]
    text = plain(model, prompt, max_new_tokens=13, end_ids=NEVER).tokens
    done = generate(
        model,
        prompt,
        drafter=scripted({tuple(prompt): text}, spoil=[2]),
        draft_length=4,
        max_new_tokens=13,
        end_ids=NEVER,
    )
    assert done.counts() == {"drafted": 14, "examined": 11, "accepted": 8, "target_passes": 4}
    assert (done.alpha, done.draft_yield, done.accepted_length) == (
        8 / 11,
        8 / 14,
        3.0,
    )  # the last draft is two tokens: the budget
    empty = generate(
        model, prompt, drafter=Lookup(), draft_length=0, max_new_tokens=5, end_ids=NEVER
    )
    assert (
        empty.alpha is None
        and empty.draft_yield is None
        and empty.accepted_length == 1.0
        and empty.c is None
    )


def test_times_add_up(model, scripted, monkeypatch):
    """A clock on which a draft takes 3 and a target pass 10."""
    prompt, at = PROMPTS[1], [0.0]
    text = plain(model, prompt, max_new_tokens=13, end_ids=NEVER).tokens
    drafter = scripted({tuple(prompt): text}, spoil=[1])
    propose, observe = drafter.propose, model.forward
    monkeypatch.setattr(
        drafter, "propose", lambda *a: (at.__setitem__(0, at[0] + 3), propose(*a))[1]
    )
    monkeypatch.setattr(
        model, "forward", lambda *a, **k: (at.__setitem__(0, at[0] + 10), observe(*a, **k))[1]
    )
    monkeypatch.setattr("labkit.generate.speculative.now", lambda: at[0])
    done = generate(
        model, prompt, drafter=drafter, draft_length=2, max_new_tokens=13, end_ids=NEVER
    )
    assert done.tally.target_passes == 6 and done.accepted_length == 2.0
    assert (done.tally.draft_s, done.tally.verify_s, done.tally.overhead_s) == (18, 60, 0)
    assert done.c == pytest.approx(
        3 * 6 / 11 / 10
    )  # the last draft is one token: the budget leaves no more


def test_two_calls_in_a_row_are_alike(model, near):
    for drafter in (DraftModel(near), Lookup(shortest=1)):
        calls = [
            generate(
                model,
                PROMPTS,
                drafter=drafter,
                draft_length="auto",
                max_new_tokens=30,
                end_ids=NEVER,
            )
            for _ in range(2)
        ]
        assert [one.counts() for one in calls[0]] == [one.counts() for one in calls[1]]


def test_a_contiguous_cache_that_grows_under_a_shared_draft(model):
    """Slots double in the middle of a draft."""
    done = generate(
        model,
        PROMPTS[1],
        drafter=make_drafter("self_quantized", model),
        draft_length=8,
        max_new_tokens=300,
        end_ids=NEVER,
        cache=lambda *a, **k: ContiguousCache(*a, **k),
    )
    assert done.tokens == plain(model, PROMPTS[1], max_new_tokens=300, end_ids=NEVER).tokens
