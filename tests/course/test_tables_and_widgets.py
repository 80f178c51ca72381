"""Tables carry their units in the header; a slider always leaves a static figure, and no widget under the runner."""

import pytest

from labkit.errors import BadRequest
from labkit_course.show import figures, plots, widgets
from labkit_course.show.tables import short, table


def draw(batch):
    fig, ax = figures.canvas()
    plots.bar_plot(ax, {"batch": batch}, xlabel="sequences")
    return fig


def show_slider(**changed):
    words = {
        "label": "batch",
        "name": "batch",
        "alt": "One bar as long as the batch is large.",
        "caption": "Computed.",
    }
    return widgets.slider(draw, [1, 2, 4], **{"start": 2, **words, **changed})


def test_bytes_of_a_column_share_one_binary_unit_in_the_header():
    frame = table(
        [{"model": "a", "KV": 147_456}, {"model": "b", "KV": 2 * 1024**2}], units={"KV": "bytes"}
    )
    assert frame.columns.name == "model" and list(frame.index) == ["a", "b"]
    assert list(frame.columns) == ["KV [KiB]"]
    assert list(frame["KV [KiB]"]) == ["144", "2,048"]


def test_units_scale_from_seconds_and_shares():
    frame = table(
        [{"arm": "plain", "TPOT": 0.0123, "share": 0.5, "n": 3, "note": None}],
        units={"TPOT": "ms", "share": "%"},
    )
    assert frame.loc["plain"].to_dict() == {
        "TPOT [ms]": "12.30",
        "share [%]": "50.0",
        "n": "3",
        "note": "—",
    }


def test_a_unit_for_an_unknown_column_is_an_error():
    with pytest.raises(BadRequest, match="tpot"):
        table([{"arm": "plain"}], units={"tpot": "ms"})
    with pytest.raises(BadRequest, match="There are no rows"):
        table([])


def test_under_the_runner_there_is_a_figure_and_no_widget(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RUN_DIR", str(tmp_path))
    assert show_slider() is None
    assert (tmp_path / "figures" / "batch.png").exists()


def test_without_ipywidgets_there_is_a_figure_and_no_widget(tmp_path, monkeypatch):
    monkeypatch.delenv("LABKIT_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    assert show_slider() is None
    assert (tmp_path / "runs" / "notebook" / "figures" / "batch.png").exists()


def test_where_someone_can_move_it_the_slider_redraws(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LABKIT_RUN_DIR", raising=False)
    monkeypatch.setattr(widgets, "can_slide", lambda: True)
    drawn = []
    monkeypatch.setattr(widgets, "png", lambda fig: drawn.append(fig) or figures.png(fig))
    handle = show_slider()
    before = len(drawn)
    handle.value = 4
    assert len(drawn) == before + 1


def test_a_slider_starts_at_one_of_its_values():
    with pytest.raises(BadRequest, match="starts at 3"):
        show_slider(start=3)


def test_numbers_are_written_as_people_write_them():
    assert [short(value) for value in (0.01234, 4.5, 99.94, 1234.6, 3.2e9)] == [
        "0.0123",
        "4.5",
        "99.9",
        "1,235",
        "3.2e+09",
    ]
