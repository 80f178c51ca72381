"""Plot number formats: the values of each, and how a weight's rounding depends on its group.

`number_line_plot`: one row per format, one tick per value. `rounding_plot`: a row of weights,
the grid that they share, and their rounded values. Both print well in greyscale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.errors import BadRequest
from labkit_course.show.figures import COLOURS, INK
from labkit_course.show.plots import finish, in_house_style


@in_house_style
def number_line_plot(
    ax, rows: Mapping[str, Sequence[float]], *, xlabel: str, title: str = ""
) -> None:
    """Draw {name: values} as ticks on a line, with their number at its end."""
    if not rows or not all(len(values) for values in rows.values()):
        raise BadRequest("A row of the number line is empty; give at least one value per row.")
    for row, values in enumerate(rows.values()):
        ax.hlines(row, min(values), max(values), color="#bbbbbb", linewidth=0.8)
        width = 1.6 if len(values) <= 32 else 0.6
        ax.vlines(values, row - 0.3, row + 0.3, color=COLOURS[0], linewidth=width)
    reach = max(abs(value) for values in rows.values() for value in values)
    names = [f"{name}\n{len(values)} values" for name, values in rows.items()]
    ax.set_yticks(range(len(rows)), names)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(-1.05 * reach, 1.05 * reach)
    finish(ax, xlabel, "", title)
    ax.grid(visible=False)


@in_house_style
def rounding_plot(
    ax, weights: Sequence[float], held: Sequence[float], grid: Sequence[float], *, title: str = ""
) -> None:
    """Draw weights as rings, their rounded values as dots, the values of the grid as lines."""
    if len(weights) != len(held):
        raise BadRequest(
            f"{len(weights)} weights and {len(held)} rounded ones do not match; give one per weight."
        )
    places = range(len(weights))
    for value in grid:
        ax.axhline(value, color="#c8c8c8", linewidth=0.7, zorder=0)
    ax.vlines(places, weights, held, color=COLOURS[1], linewidth=1.6)
    ax.plot(
        places,
        weights,
        "o",
        markerfacecolor="white",
        markeredgecolor=INK,
        markersize=5,
        label="weight",
    )
    ax.plot(places, held, "o", color=COLOURS[2], markersize=4, label="held")
    finish(ax, "position in the group", "weight", title)
    ax.grid(visible=False)
    ax.legend(loc="best")
