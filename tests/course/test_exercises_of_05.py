"""The checks of notebook 05: right answers pass, and each mistake is named. And its two pictures."""

import pytest
import torch

from labkit.errors import BadRequest
from labkit_course.checks import smaller_cache as ex
from labkit_course.checks.smaller_cache import held_like
from labkit_course.show.cache_plots import attention_plot, channels_plot
from labkit_course.show.figures import canvas


def per_channel(keys, bits):
    return held_like(keys, bits, 0)


def kept(length, window, sinks):
    return sorted({*range(min(sinks, length)), *range(max(0, length - window), length)})


def test_right_answers_pass():
    assert ex.check_kv_bits(8.25) and ex.check_per_channel(per_channel) and ex.check_window(kept)


def unguarded(keys, bits):
    low, high = keys.amin(0), keys.amax(0)
    return ((keys - low) / ((high - low) / (2**bits - 1))).round() * (
        (high - low) / (2**bits - 1)
    ) + low


@pytest.mark.parametrize(
    ("check", "answer", "named"),
    [
        (ex.check_kv_bits, 8, "codes alone"),
        (ex.check_kv_bits, 8.125, "both a scale"),
        (ex.check_kv_bits, 8.5, "head_dim is 128"),
        (ex.check_kv_bits, 40, "divide them"),
        (ex.check_kv_bits, 1.03125, "in bytes"),
        (ex.check_kv_bits, 5, "divided by 128 numbers"),
        (ex.check_per_channel, lambda keys, bits: held_like(keys, bits, 1), "per \\*token\\*"),
        (
            ex.check_per_channel,
            lambda keys, bits: held_like(keys, bits, None),
            "one scale for everything",
        ),
        (
            ex.check_per_channel,
            lambda keys, bits: held_like(keys, bits, 0, minimum=False),
            "minimum is missing",
        ),
        (
            ex.check_per_channel,
            lambda keys, bits: held_like(keys, bits, 0, top=1 << bits),
            "count from 0 to 15",
        ),
        (ex.check_per_channel, lambda keys, bits: keys, "nothing was rounded"),
        (ex.check_per_channel, lambda keys, bits: keys.T, "same shape"),
        (ex.check_per_channel, unguarded, "NaN"),
        (
            ex.check_per_channel,
            lambda keys, bits: keys.round(),
            "minimum and maximum of each column",
        ),
        (ex.check_window, lambda n, w, s: range(max(0, n - w), n), "sinks are missing"),
        (
            ex.check_window,
            lambda n, w, s: {*range(min(s, n)), *range(max(0, n - 1 - w), n)},
            "starts one later",
        ),
        (ex.check_window, lambda n, w, s: [*range(min(s, n)), *range(max(0, n - w), n)], "twice"),
        (
            ex.check_window,
            lambda n, w, s: {*range(s), *range(max(0, n - max(w - s, 0)), n)},
            "next to the window",
        ),
        (ex.check_window, lambda n, w, s: range(n), "Position s is visible"),
        (ex.check_window, lambda n, w, s: kept(n, w, s) + [n], "go from 0"),
    ],
)
def test_each_mistake_is_named(check, answer, named, capsys):
    assert not check(answer)
    import re

    assert re.search(named, capsys.readouterr().out)


def test_codes_that_were_never_turned_back_are_named(capsys):
    def codes(keys, bits):
        low, high = keys.amin(0), keys.amax(0)
        return ((keys - low) / ((high - low) / (2**bits - 1)).clamp(min=1e-30)).round()

    assert not ex.check_per_channel(codes)
    assert "those are the codes" in capsys.readouterr().out


def test_the_pictures_draw_every_row_and_mark_every_answer():
    _, (left, right) = canvas(2)
    channels_plot(left, torch.rand(5, 8).tolist(), title="keys")
    attention_plot(right, [[0.1, 0.9], [0.7, 0.2]], [1, 0], most=0.9)
    assert left.images[0].get_array().shape == (5, 8)
    assert list(right.lines[0].get_xdata()) == [1, 0] and right.images[0].get_clim() == (0, 0.9)


def test_numbers_that_a_plot_cannot_show_are_errors():
    _, ax = canvas()
    with pytest.raises(BadRequest, match="absolute values"):
        channels_plot(ax, [[-1.0]])
    with pytest.raises(BadRequest, match="one answer per row"):
        attention_plot(ax, [[0.5]], [0, 1], most=1.0)
