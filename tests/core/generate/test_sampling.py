"""Sampling against transformers' processors, against plain recomputation, and against its own distribution."""

import itertools
from dataclasses import replace

import pytest
import torch

from labkit.errors import BadRequest
from labkit.generate.sampling import (
    InvalidLogits,
    Past,
    Sampling,
    draw,
    greedy,
    probabilities,
    process,
    sample,
)

V = 50
NAN, INF = float("nan"), float("inf")


def random_row(seed, size=V):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


def theirs(logits, tokens, num_prompt, sampling, end_ids):
    """The same settings through transformers' own processors, as a distribution."""
    import transformers as hf

    steps = []
    if sampling.repetition_penalty != 1:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.min_new_tokens:
        steps.append(
            hf.MinNewTokensLengthLogitsProcessor(
                num_prompt, sampling.min_new_tokens, list(end_ids), "cpu"
            )
        )
    if sampling.bad_words:
        steps.append(hf.NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words]))
    steps.append(hf.TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k is not None:
        steps.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        steps.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        steps.append(hf.MinPLogitsWarper(sampling.min_p))
    scores, ids = logits[None].clone(), torch.tensor([tokens])
    for step in steps:
        scores = step(ids, scores)
    return scores[0].softmax(0)


SETTINGS = [
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 500},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 1.0},
    {"min_p": 0.1},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"min_new_tokens": 4},
    {"min_new_tokens": 3},
    {"bad_words": [[4], [7, 9], [3, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]},
    {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "min_new_tokens": 9,
        "bad_words": [[3, 7, 9]],
    },
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_distribution_is_that_of_transformers(settings):
    sampling = Sampling(**({"temperature": 1.0} | settings))
    tokens, num_prompt, end_ids = [11, 12, 4, 30, 3, 7], 3, (2, 5)
    for seed in range(40):
        logits = random_row(seed)
        ours = probabilities(logits, sampling, Past(tokens, num_prompt, end_ids))
        expected = theirs(logits, tokens, num_prompt, sampling, end_ids)
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
        assert ((ours > 0) == (expected > 0)).all()


@pytest.mark.parametrize(
    "settings", [s for s in SETTINGS if not {"top_k", "top_p", "min_p"} & set(s)], ids=str
)
def test_greedy_takes_the_likeliest_after_the_same_penalties(settings):
    sampling = Sampling(**(settings | {"temperature": 0}))
    tokens, num_prompt, end_ids = [11, 12, 4, 30, 3, 7], 3, (2, 5)
    for seed in range(40):
        logits = random_row(seed)
        expected = int(
            theirs(logits, tokens, num_prompt, replace(sampling, temperature=1.0), end_ids).argmax()
        )
        past = Past(tokens, num_prompt, end_ids)
        assert sample(logits, sampling, past) == expected
        assert probabilities(logits, sampling, past)[expected] == 1


@pytest.mark.parametrize(
    ("frequency", "presence"), [(0.5, 0.0), (0.0, 0.7), (0.3, -0.4), (-1.0, 2.0)]
)
def test_frequency_and_presence_count_generated_tokens_only(frequency, presence):
    sampling = Sampling(temperature=1, frequency_penalty=frequency, presence_penalty=presence)
    tokens, num_prompt, logits = [5, 5, 6, 8, 7, 8, 8, 5], 3, random_row(0)
    plain = logits.clone()
    for token in range(V):
        count = tokens[num_prompt:].count(token)
        plain[token] -= frequency * count + presence * (count > 0)
    torch.testing.assert_close(
        probabilities(logits, sampling, Past(tokens, num_prompt)), plain.softmax(0)
    )
    torch.testing.assert_close(
        process(logits, replace(sampling, temperature=0), Past(tokens, num_prompt)), plain
    )


def test_equal_logits_give_the_lowest_id_on_every_path():
    logits = torch.zeros(V)
    logits[[7, 20, 41]] = 5.0
    assert greedy(logits[None]) == [7]
    assert sample(logits, Sampling()) == 7
    assert sample(logits, Sampling(repetition_penalty=1.5), Past([3], 1)) == 7
    one = Sampling(temperature=1, top_k=1)
    assert probabilities(logits, one).nonzero().flatten().tolist() == [7]
    assert probabilities(logits, replace(one, top_k=2)).nonzero().flatten().tolist() == [7, 20]
    assert probabilities(logits, replace(one, top_k=4)).nonzero().flatten().tolist() == [
        0,
        7,
        20,
        41,
    ]
    assert probabilities(
        logits, Sampling(temperature=1, top_p=0.01)
    ).nonzero().flatten().tolist() == [7]
    assert (
        probabilities(torch.zeros(V), Sampling(temperature=1, top_p=0.099)).nonzero().numel() == 5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_fast_path_and_the_full_path_agree_in_every_dtype(dtype):
    rows = torch.stack([random_row(seed) for seed in range(20)]).to(dtype)
    rows[3, 10] = rows[3, 30] = rows[3].max() + 1
    assert greedy(rows) == [sample(row, Sampling()) for row in rows]


BROKEN = {
    "a NaN": [0.0, NAN, 1.0],
    "NaN everywhere": [NAN] * 3,
    "-inf everywhere": [-INF] * 3,
    "+inf": [0.0, INF, 1.0],
    "NaN and +inf": [NAN, INF, 0.0],
    "NaN last": [5.0, 1.0, NAN],
}


@pytest.mark.parametrize("row", BROKEN.values(), ids=BROKEN.keys())
def test_a_row_without_a_valid_token_is_an_error_of_its_own_type(row):
    row = torch.tensor(row)
    for sampling in (
        Sampling(),
        Sampling(temperature=1),
        Sampling(temperature=1, top_k=2, top_p=0.5),
        Sampling(presence_penalty=1.0),
    ):
        with pytest.raises(InvalidLogits):
            sample(row, sampling, Past([0]), generator=torch.Generator())
    with pytest.raises(InvalidLogits):
        greedy(torch.stack([torch.zeros(3), row]))


def test_some_minus_infinities_are_fine():
    row = torch.tensor([-INF, 1.0, -INF, 1.0])
    assert greedy(row[None]) == [1]
    assert probabilities(row, Sampling(temperature=1)).tolist() == [0, 0.5, 0, 0.5]


def test_a_row_that_is_banned_entirely_is_an_error():
    sampling = Sampling(min_new_tokens=1, bad_words=[[0], [1]])
    with pytest.raises(InvalidLogits, match="left after the banned"):
        sample(torch.zeros(3), sampling, Past(end_ids=[2]))
    assert sample(torch.zeros(3), sampling, Past([0], 0, [2])) == 2


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    row = torch.tensor([1e4, 3e4, -1e30, 2.99e4])
    assert probabilities(row, Sampling(temperature=1e-30)).tolist() == [0, 1, 0, 0]


def test_draws_follow_the_distribution_and_never_leave_its_support():
    sampling = Sampling(temperature=1.3, top_k=6)
    expected = probabilities(random_row(3), sampling)
    generator = torch.Generator().manual_seed(0)
    n = 20_000
    counts = torch.bincount(
        torch.tensor([draw(expected, generator) for _ in range(n)]), minlength=V
    )
    assert counts[expected == 0].sum() == 0
    inside = expected > 0
    chi2 = ((counts - n * expected) ** 2 / (n * expected))[inside].sum()
    assert chi2 < 20.5  # 99.9 % of 5 degrees of freedom


class Fixed:
    """Stands for `torch.rand`: returns the numbers it is given."""

    def __init__(self, *numbers):
        self.numbers = iter(numbers)

    def __call__(self, *args, **kwargs):
        return torch.tensor(next(self.numbers), dtype=torch.float64)


def test_the_ends_of_the_unit_interval_choose_possible_tokens(monkeypatch):
    distribution = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    monkeypatch.setattr(torch, "rand", Fixed(0.0, 0.2499, 0.25, 1 - 2**-53))
    assert [draw(distribution, None) for _ in range(4)] == [1, 1, 3, 3]


def test_equal_seeds_draw_equally_and_greedy_draws_nothing():
    row, sampling = random_row(1), Sampling(temperature=1)
    first, second = (torch.Generator().manual_seed(5) for _ in range(2))
    assert [sample(row, sampling, generator=first) for _ in range(20)] == [
        sample(row, sampling, generator=second) for _ in range(20)
    ]
    state = first.get_state()
    sample(row, Sampling(), generator=first)
    assert first.get_state().equal(state)


def test_processing_leaves_the_models_logits_alone():
    row = random_row(0)
    before = row.clone()
    for temperature, top_k in itertools.product((0, 1), (None, 3)):
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            repetition_penalty=2,
            presence_penalty=1,
            bad_words=[[4]],
            min_new_tokens=5,
        )
        process(row, sampling, Past([1, 2, 3], 1, [9]))
    assert row.equal(before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", True),
        ("top_k", 0),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", "x"),
        ("min_p", -0.1),
        ("min_p", 1.01),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("frequency_penalty", NAN),
        ("presence_penalty", None),
        ("min_new_tokens", -1),
        ("min_new_tokens", 1.0),
        ("seed", -1),
        ("seed", None),
        ("bad_words", [[]]),
        ("bad_words", [5]),
        ("bad_words", "abc"),
        ("bad_words", ["abc"]),
        ("bad_words", [[-1]]),
        ("bad_words", [[1.0]]),
        ("bad_words", None),
    ],
)
def test_impossible_settings_are_errors_of_one_line(name, value):
    with pytest.raises(BadRequest, match=name) as refused:
        Sampling(**{name: value})
    assert (
        str(refused.value).endswith(".")
        and "\n" not in str(refused.value)
        and "give" in str(refused.value)
    )
