"""The default model, float32, PyTorch's operators: speculative equals plain, and sampled texts are as likely."""

import pytest
import torch

from labkit.cache import make_cache
from labkit.generate import Sampling, generate
from labkit.generate import generate as plain
from labkit.generate.row import Row
from labkit.generate.sampling import draw, probabilities
from labkit.generate.verify import verify_row
from labkit.lab.stack.open import load_model
from labkit.lab.texts.prompt_kinds import prompts
from labkit.speculate import Draft, make_drafter
from labkit_course.experiments.goodness import goodness_of_fit

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

DRAFTERS = ("lookup", "self_quantized", "trimmed", "lookup_first")
CACHES = ("contiguous", "windowed", "int8", "paged", "key_norm")
LENGTHS = (1, 2, 3, 5, "auto")
KINDS = {
    "copy": 3,
    "edit": 3,
    "humaneval": 2,
    "chat": 0,
    "json": 0,
    "list": 1,
    "summary": 4,
    "story": 5,
}
# Every drafter with every cache, and each of both with every length: 20 settings.
SETTINGS = [
    (drafter, cache, LENGTHS[(i + 2 * j) % 5])
    for i, drafter in enumerate(DRAFTERS)
    for j, cache in enumerate(CACHES)
]


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture(scope="module")
def texts(model):
    """One prompt of each kind; half of the answers end before 64 tokens, so rows leave the batch on the way."""
    return [prompts(kind)[place].ids(model.tokenizer) for kind, place in KINDS.items()]


@pytest.fixture(scope="module")
def plainly(model, texts):
    """Plain decoding; caches that forget and round nothing here must all agree with it."""
    return [one.tokens for one in plain(model, texts, max_new_tokens=64)]


@pytest.fixture(scope="module")
def drafters(model):
    return {name: make_drafter(name, model) for name in DRAFTERS}


@pytest.mark.parametrize("cache", CACHES)
def test_greedy_equals_plain_decoding(model, texts, plainly, drafters, cache):
    """Eight prompts, 64 tokens."""
    wanted = plainly
    if cache == "int8":
        wanted = [one.tokens for one in plain(model, texts, max_new_tokens=64, cache=cache)]
    for name, held, length in SETTINGS:
        if held == cache:
            done = generate(
                model,
                texts,
                drafter=drafters[name],
                draft_length=length,
                max_new_tokens=64,
                cache=cache,
            )
            assert [one.tokens for one in done] == wanted, (name, length)


@pytest.mark.parametrize("kind", ["drawn", "point mass", "wrong"])
def test_the_rule_on_the_models_own_distributions(model, drafters, kind):
    """5,000 verdicts on a drafted token where the model is unsure; the wrong rule says that it drew its likeliest token."""
    n, sampling = 5000, Sampling(temperature=1.2, top_k=12)
    text = model.tokenizer.chat("Tell a story that begins with a train that never stops.")
    logits = model(torch.tensor([text]))[0, -1]
    other = drafters["self_quantized"].model(torch.tensor([text]))[0, -1]
    p, q = (probabilities(scores, sampling) for scores in (logits, other))
    row = Row(0, tuple(text), 99, torch.Generator().manual_seed(7))
    both, counts = logits.repeat(2, 1), torch.zeros(p.numel(), dtype=torch.float64)
    for _ in range(n):
        token = draw(q, row.generator) if kind == "drawn" else int(q.argmax())
        draft = Draft([token], None if kind == "point mass" else q[None])
        counts[verify_row(both, draft, row, sampling, frozenset())[0][0]] += 1
    fit = goodness_of_fit(counts.tolist(), p.tolist())
    print(f"{kind}: {fit}")
    assert (fit.p > 0.01) == (kind != "wrong")


def test_a_draft_that_is_the_target_keeps_in_step(model):
    """Also where the target found most of the prompt in its cache."""
    from labkit.speculate import DraftModel

    text = model.tokenizer.chat("List ten European capitals with their countries.")
    cache = make_cache("contiguous", model.config.kv_shape, 1, 512)
    model(torch.tensor([text[:-3]]), cache)
    drafter = DraftModel(model)
    done = generate(
        model, text, drafter=drafter, draft_length=3, max_new_tokens=41, end_ids=(), cache=cache
    )
    assert (
        done.alpha == 1.0
        and done.tally.target_passes == 10
        and drafter.cache.length == len(text) + 40 - 1
    )
