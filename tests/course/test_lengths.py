"""The first lesson's measurements do the work they say: which tokens are computed in which arm."""

import pytest
import torch

from labkit.errors import BadRequest
from labkit.model.tiny import tiny_model
from labkit_course.experiments.cache_or_not import (
    ARMS,
    answer_times,
    growth,
    random_tokens,
    step_times,
)


class Counting(torch.nn.Module):
    """A model that notes how many tokens each pass computes, and how long the cache is after it."""

    def __init__(self, model):
        super().__init__()
        self.inner, self.passes = model, []
        self.config, self.tokenizer, self.new_cache = model.config, model.tokenizer, model.new_cache
        self.device, self.dtype = model.device, model.dtype

    def forward(self, tokens, cache=None, *arguments, **options):
        result = self.inner(tokens, cache, *arguments, **options)
        self.passes.append((tokens.shape[1], None if cache is None else cache.length))
        return result


@pytest.fixture
def model():
    return Counting(tiny_model(seed=0))


def test_a_step_computes_the_whole_text_without_a_cache_and_one_token_with_one(model):
    timings = step_times(model, [4, 9], repeats=2)
    assert set(timings) == set(ARMS)
    assert all([len(timing.times_s) for timing in arm] == [2, 2] for arm in timings.values())
    fill = (4, 4)
    assert model.passes[0] == fill
    assert sorted(model.passes[1:7], key=str) == sorted([(4, None)] * 3 + [(1, 4)] * 3, key=str)
    assert set(model.passes[8:]) == {(9, None), (1, 9)}


def test_an_answer_costs_prompt_plus_new_minus_one_positions_with_a_cache(model):
    answer_times(model, 5, 3, repeats=1)
    without = sum(tokens for tokens, length in model.passes if length is None)
    with_cache = sum(tokens for tokens, length in model.passes if length is not None)
    assert without == 2 * (5 + 6 + 7)  # once to warm up, once timed
    assert with_cache == 2 * (5 + 3 - 1)


def test_growth_has_one_clock_a_token_that_never_goes_back(model):
    clocks = growth(model, 4, 6, repeats=2)
    for points in clocks.values():
        assert len(points) == 6
        assert all(low <= middle <= high for middle, low, high in points)
        assert [middle for middle, _, _ in points] == sorted(middle for middle, _, _ in points)


def test_random_tokens_repeat_and_are_in_the_vocabulary(model):
    tokens = random_tokens(model, 50)
    assert tokens == random_tokens(model, 50)
    assert max(tokens) < model.config.vocab_size
    with pytest.raises(BadRequest, match="at least 1"):
        random_tokens(model, 0)
