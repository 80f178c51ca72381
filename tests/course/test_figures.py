"""Figures: no figure without words, equal bytes for equal figures, colours that survive greyscale."""

import io
from itertools import combinations, pairwise

import pytest
from matplotlib import image
from matplotlib.colors import to_rgb

from labkit.errors import BadRequest
from labkit.lab.measure.clock import Timing
from labkit_course.show import figures, plots

ALT = "Two curves over length; the one with a cache stays flat."
CAPTION = "Seconds a token, n = 5."


@pytest.fixture(autouse=True)
def run_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RUN_DIR", str(tmp_path))
    return tmp_path


def lightness(colour):
    """CIE L* of a colour, 0 to 100."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 116 * luminance ** (1 / 3) - 16 if luminance > 0.008856 else 903.3 * luminance


def drawn():
    fig, ax = figures.canvas()
    plots.band_plot(
        ax, [1, 2], {"cache": [(1.0, 0.9, 1.2), 1.0]}, xlabel="length", ylabel="time [s]"
    )
    return fig


def test_curves_differ_in_lightness_marker_and_dash():
    for one, other in combinations(figures.COLOURS, 2):
        assert abs(lightness(one) - lightness(other)) >= 15, (one, other)
    assert all(lightness(a) < lightness(b) for a, b in pairwise(figures.COLOURS))
    assert len(set(figures.MARKERS)) == len(set(figures.DASHES)) == len(figures.COLOURS)


def test_a_figure_is_saved_into_the_run_folder_as_a_readable_picture(run_folder):
    assert (
        figures.figure(drawn(), "decode_time", alt=ALT, caption=CAPTION) is None
    )  # nothing for a cell to echo
    path = run_folder / "figures" / "decode_time.png"
    assert image.imread(io.BytesIO(path.read_bytes())).shape[1] == 7.4 * figures.PIXELS_PER_INCH


def test_equal_figures_are_equal_files(run_folder):
    assert figures.png(drawn()) == figures.png(drawn())


@pytest.mark.parametrize(
    ("name", "alt", "caption", "named"),
    [
        ("decode_time", "", CAPTION, "description"),
        ("decode_time", "a plot", CAPTION, "description"),
        ("decode_time", ALT, "", "how many measurements"),
        ("decode_time", ALT, "Seconds a token.", "how many measurements"),
        ("../decode", ALT, CAPTION, "file name"),
    ],
)
def test_a_figure_without_words_is_refused_and_not_written(name, alt, caption, named, run_folder):
    with pytest.raises(BadRequest, match=named):
        figures.figure(drawn(), name, alt=alt, caption=caption)
    assert not list(run_folder.rglob("*.png"))


def test_the_description_travels_with_the_image_and_stands_under_it(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    figures.figure(drawn(), "decode_time", alt=ALT, caption=CAPTION)
    picture, words = shown
    assert picture._repr_mimebundle_()[1]["image/png"]["alt"] == ALT
    assert CAPTION in words.data and ALT in words.data


def test_a_fifth_curve_is_refused():
    with pytest.raises(BadRequest, match="two plots"):
        figures.curve_style(4)


def test_a_timing_is_drawn_with_its_spread():
    _, ax = figures.canvas()
    timing = Timing((1.0, 2.0, 9.0))
    plots.band_plot(
        ax, [8], {"a": [timing]}, {"a": [1.5]}, xlabel="length", ylabel="time [ms]", scale=1e3
    )
    measured, predicted = ax.lines
    assert list(measured.get_ydata()) == [2000.0] and list(predicted.get_ydata()) == [1500.0]
    assert [list(end) for end in ax.collections[0].get_segments()[0]] == [
        [8.0, 1000.0],
        [8.0, 9000.0],
    ]


def test_a_curve_with_a_missing_point_is_refused():
    _, ax = figures.canvas()
    with pytest.raises(BadRequest, match="1 points for 2"):
        plots.band_plot(ax, [1, 2], {"a": [1.0]}, xlabel="x", ylabel="y")


def test_the_roof_bends_at_the_ridge():
    _, ax = figures.canvas()
    plots.roofline_plot(ax, bandwidth=10e9, flops=80e9, dots={"decode": (0.5, 4e9)})
    roof = ax.lines[0]
    assert roof.get_xdata()[1] == 8.0
    assert roof.get_ydata()[1] == roof.get_ydata()[2] == 80.0
    assert roof.get_ydata()[0] == pytest.approx(10 * roof.get_xdata()[0])


def test_bars_carry_their_interval():
    _, ax = figures.canvas()
    plots.bar_plot(ax, {"plain": (10, 9, 12), "cache": 30}, xlabel="tok/s")
    assert [bar.get_width() for bar in ax.patches] == [10, 30]
    assert [list(line.get_xdata()) for line in ax.lines] == [[9, 12]]


def test_a_prediction_plot_needs_something_to_show():
    _, ax = figures.canvas()
    with pytest.raises(BadRequest, match="at least one pair"):
        plots.prediction_plot(ax, {"tpot": []}, unit="ms")
