"""Pictures of formats and of losses: what is drawn, and what is refused."""

import pytest

from labkit.errors import BadRequest
from labkit_course.show.figures import canvas, png
from labkit_course.show.loss_plots import bits_loss_plot, map_plot
from labkit_course.show.number_plots import number_line_plot, rounding_plot


def test_a_number_line_says_how_many_values_there_are():
    fig, ax = canvas()
    number_line_plot(ax, {"int3": [-1, 0, 1], "one": [0.5]}, xlabel="value")
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "int3\n3 values",
        "one\n1 values",
    ]
    assert png(fig)
    with pytest.raises(BadRequest, match="at least one value"):
        number_line_plot(ax, {"none": []}, xlabel="value")


def test_a_rounding_plot_needs_one_rounded_value_per_weight():
    fig, ax = canvas()
    rounding_plot(ax, [0.1, 0.2], [0.0, 0.25], [0.0, 0.25])
    with pytest.raises(BadRequest, match="one per weight"):
        rounding_plot(ax, [0.1], [0.0, 0.25], [0.0])


def test_losses_stand_on_a_logarithmic_axis_with_their_intervals():
    fig, ax = canvas()
    bits_loss_plot(ax, {"rtn": [(5, (0.1, 0.08, 0.12)), (4, (0.4, 0.3, 0.5))]})
    assert ax.get_yscale() == "log" and list(ax.lines[0].get_xdata()) == [4, 5]
    assert png(fig)
    with pytest.raises(BadRequest, match="above 0"):
        bits_loss_plot(ax, {"own grid": [(5, (0.0, 0.0, 0.0))]})
    with pytest.raises(BadRequest, match="at most 4"):
        bits_loss_plot(ax, {str(i): [(4, (1, 1, 1))] for i in range(5)})


def test_a_map_labels_its_cells_and_has_one_shape():
    fig, ax = canvas()
    map_plot(ax, ["a", "b"], ["0-9", "10-19"], [[1.0, 2.0], [3.0, 400.0]])
    assert sorted(text.get_text() for text in ax.texts) == ["1", "2", "3", "400"]
    assert png(fig)
    with pytest.raises(BadRequest, match="another shape"):
        map_plot(ax, ["a"], ["0-9"], [[1.0, 2.0]])
    with pytest.raises(BadRequest, match="above 0"):
        map_plot(ax, ["a"], ["0-9"], [[0.0]])
