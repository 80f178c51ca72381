"""One way in: every option of `generate` and `stream`, with and without a drafter and a prefix store."""

import pytest

from labkit.cache.paged.pool import PagePool
from labkit.cache.prefix.store import PrefixStore
from labkit.errors import BadRequest
from labkit.generate import Draft, Drafter, generate, stream
from labkit.generate.__main__ import TwoTokens, main
from labkit.model.fingerprint import fingerprint
from labkit.model.tiny import tiny_model

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 10, 11, 12, 13]]
OPTIONS = {"max_new_tokens": 20, "end_ids": ()}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def expected(model):
    return [done.tokens for done in generate(model, PROMPTS, **OPTIONS)]


@pytest.fixture
def store(model):
    pool = PagePool(model.config.kv_shape, 200, 4, model.dtype)
    return PrefixStore(pool, 200 * pool.block_bytes)


@pytest.fixture
def view(model, store):
    return store.open("a", "", fingerprint(model))


class Known(Drafter):
    """Drafts what was said before, every third token wrong."""

    name = "known"

    def __init__(self, texts):
        self.texts = {tuple(prompt): text for prompt, text in zip(PROMPTS, texts)}

    def propose(self, rows, limits):
        drafts = []
        for row, limit in zip(rows, limits):
            first = len(row.tokens)
            text = self.texts[row.prompt][first : first + limit]
            drafts.append(Draft([t if (first + i) % 3 else 95 - t for i, t in enumerate(text)]))
        return drafts


@pytest.mark.parametrize("way", ["generate", "stream"])
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_every_combination_gives_the_same_tokens(model, expected, store, view, way, drafted, kept):
    extra = {"drafter": Known(expected)} if drafted else {}
    extra |= {"prefixes": view} if kept else {}
    for _ in range(2):  # the second time with the prompts in the store
        if way == "generate":
            done = generate(model, PROMPTS, **OPTIONS, **extra)
            assert [one.tokens for one in done] == expected
            assert all((one.tally.accepted > 0) == drafted for one in done)
            assert {one.drafter for one in done} == {"known" if drafted else None}
        else:
            rows = [[], []]
            for token in stream(model, PROMPTS, **OPTIONS, **extra):
                rows[token.row].append(token.id)
            assert list(map(tuple, rows)) == expected
    assert store.counters.hits == (2 if kept else 0)


@pytest.mark.parametrize("length", [0, 1, 5, "auto"])
def test_any_draft_length_gives_the_same_tokens(model, expected, length):
    done = generate(model, PROMPTS, drafter=Known(expected), draft_length=length, **OPTIONS)
    assert [one.tokens for one in done] == expected


def test_leaving_a_stream_over_prefixes_gives_its_blocks_back(model, store, view):
    pool = store.pool
    tokens = stream(model, PROMPTS[0], prefixes=view, **OPTIONS)
    assert pool.free == pool.total  # nothing is taken before the first token
    next(tokens)
    tokens.close()
    assert pool.free == pool.total


def test_an_error_in_on_token_gives_the_blocks_back(model, store, view):
    def fail(token):
        raise KeyError(token.id)

    with pytest.raises(KeyError):
        generate(model, PROMPTS[0], prefixes=view, on_token=fail, **OPTIONS)
    assert store.pool.free == store.pool.total


def test_stream_calls_on_token_too(model, expected):
    seen = []
    tokens = list(stream(model, PROMPTS[0], on_token=seen.append, **OPTIONS))
    assert seen == tokens and [token.id for token in seen] == list(expected[0])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"drafter": "lookup"}, "make_drafter"),
        ({"drafter": TwoTokens(), "draft_length": -1}, "draft_length"),
        ({"drafter": TwoTokens(), "draft_length": "often"}, "auto"),
    ],
)
def test_an_invalid_drafter_or_length_is_an_error_before_any_work(model, options, why):
    for call in (generate, stream):
        with pytest.raises(BadRequest, match=why):
            call(model, PROMPTS[0], **options)


def test_an_unknown_option_is_an_error(model):
    with pytest.raises(BadRequest, match="max_tokens.*max_new_tokens"):
        generate(model, PROMPTS[0], max_tokens=5)


def test_the_module_compares_three_ways(capsys):
    assert main([]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["plain", "cached", "speculative"]
    assert all(line.endswith("yes") for line in lines)
    assert main(["no-such-folder/model"]) == 2
    assert main(["--help"]) == 0 and main(["a", "b"]) == 2
