"""The measurements of pages and prefixes on a tiny model: what is counted is right, whatever the clock says."""

import pytest

from labkit.errors import BadRequest
from labkit.model.fingerprint import fingerprint
from labkit.model.tiny import tiny_model
from labkit_course.experiments import paging as pages
from labkit_course.experiments import prefixes


def test_waste_of_real_tables_is_what_the_slots_say_and_near_what_is_expected():
    lengths = pages.conversation_lengths(200)
    assert lengths == pages.conversation_lengths(200) and min(lengths) >= 8 and max(lengths) <= 2048
    slots = pages.slots_allocated(lengths, 2048)
    measured = pages.measured_waste(lengths, 16)
    assert measured == pytest.approx(1 - sum(lengths) / slots["pages of 16"])
    assert (
        measured == pytest.approx(pages.expected_waste(sum(lengths) / 200, 16), rel=0.15)
        and measured < 0.04
    )
    assert list(slots.values()) == sorted(slots.values(), reverse=True)
    assert pages.rows_that_fit([5, 5, 5], 10, lambda n: n) == 2
    with pytest.raises(BadRequest):
        pages.conversation_lengths(0)


def test_every_arm_of_a_step_goes_back_and_can_run_again():
    model = tiny_model()
    lengths = {"equal": (9, 9), "unequal": (3, 20)}
    layer = pages.layer_times(model, list(pages.KINDS), lengths, repeats=2)
    assert set(layer) == {(kind, name) for kind in pages.KINDS for name in lengths}
    assert set(pages.step_times(model, ["padded", "pages"], lengths["unequal"], repeats=2)) == {
        "padded",
        "pages",
    }


def test_askers_compute_what_they_must():
    model = tiny_model(max_positions=2048)
    askers = prefixes.ttft_by_asker(model, fingerprint(model), 64, 16, repeats=2)
    assert askers.computed[prefixes.OTHER] == askers.computed[prefixes.NOBODY] == 80
    assert (
        14 <= askers.computed[prefixes.HIT] <= 16
    )  # of 96 tokens, the first of two questions may be the same
    assert all(len(timing.times_s) == 2 for timing in askers.times.values())


@pytest.mark.parametrize("salted", [False, True])
def test_a_guess_finds_the_victims_tokens_only_where_tenants_are_not_apart(salted, monkeypatch):
    model, found = tiny_model(max_positions=2048), []

    def ttft(model, tokens, view):  # what a perfect clock would show
        lease = view.lookup(tokens)
        found.append(lease.length)
        lease.cache.rewind(0)
        real(model, tokens, view)
        return len(tokens) - lease.length

    real = prefixes.ttft
    monkeypatch.setattr(prefixes, "ttft", ttft)
    memos = [[5 + n] * 48 for n in range(4)]
    guess = prefixes.guess(model, fingerprint(model), memos, [70, 71], 2, salted=salted)
    assert (max(found) > 0) == guess.right == (not salted)
