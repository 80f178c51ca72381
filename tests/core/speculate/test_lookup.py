"""Look-up: which match wins, and what is never one."""

import pytest

from labkit.errors import BadRequest
from labkit.generate import generate
from labkit.generate import generate as plain
from labkit.model.tiny import tiny_model
from labkit.speculate import Lookup
from labkit.speculate.lookup import Index


def found(text, limit=3, longest=3, shortest=1, trust=9):
    index = Index(longest, shortest)
    return index.draft(text, limit, trust)


def test_the_longest_match_wins_then_the_most_recent():
    assert found([1, 2, 3, 7, 9, 3, 8, 1, 2, 3]) == [
        7,
        9,
        3,
    ]  # [1 2 3] before, though [3] was followed by 8 more recently
    assert found([5, 3, 7, 5, 3, 8, 6, 5, 3], limit=1) == [8]  # [5 3] twice: the later
    assert found([5, 3, 7, 4, 3, 8, 9, 3], limit=1, longest=1) == [8]


def test_the_maximum_is_heeded():
    text = [1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]
    assert found(text, limit=1, longest=3) == [7] and found(text, limit=1, longest=2) == [8]
    assert found(text, limit=1, longest=2, shortest=2) == [8] and found([1, 2, 1], shortest=2) == []


def test_a_text_is_never_its_own_match():
    assert found([1, 2, 3]) == [] and found([4]) == [] and found([]) == []
    assert found([1], longest=3, shortest=3) == []
    assert found([7, 7], limit=4) == [7, 7, 7, 7]  # the first 7 was followed by one


def test_a_draft_that_reaches_the_end_goes_on_with_itself():
    assert found([1, 2, 3, 1, 2], limit=7, longest=2) == [3, 1, 2, 3, 1, 2, 3]


def test_a_match_is_trusted_for_as_many_tokens_as_it_is_long_times_two():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert found(text, limit=8, trust=2) == [3, 4, 5, 6] and found(text, limit=3, trust=2) == [
        3,
        4,
        5,
    ]
    assert found(text, limit=8, longest=1, trust=2) == [3, 4]


def test_growing_the_index_step_by_step_is_building_it_at_once():
    text = [i * i % 7 for i in range(60)]
    grown = Index(4, 2)
    for end in range(1, len(text) + 1):
        grown.extend(text[:end])
        whole = Index(4, 2)
        whole.extend(text[:end])
        assert grown.after == whole.after and grown.match(text[:end]) == whole.match(text[:end])
        assert grown.match(text[:end]) == by_scanning(text[:end])


def by_scanning(text):
    for size in (4, 3, 2):
        for place in range(len(text) - 1, size - 1, -1):
            if len(text) > size and text[place - size : place] == text[len(text) - size :]:
                return place, size
    return None


def test_a_prompt_of_one_token_drafts_nothing_and_is_no_error():
    model = tiny_model()
    done = generate(model, [5], drafter=Lookup(longest=3, shortest=3), max_new_tokens=3, end_ids=())
    assert (
        done.tally.drafted == 0
        and done.tokens == plain(model, [5], max_new_tokens=3, end_ids=()).tokens
    )


@pytest.mark.parametrize(
    "settings", [{"longest": 1, "shortest": 2}, {"shortest": 0}, {"longest": 2.5}, {"trust": 0}]
)
def test_settings_that_mean_nothing_are_errors(settings):
    with pytest.raises(BadRequest):
        Lookup(**settings)
