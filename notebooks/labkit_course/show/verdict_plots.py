"""Plot the cost of a change on several tasks: dots with intervals, filled if significant.

A hollow dot does not prove that nothing changed. Its interval shows how large a change can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.errors import BadRequest
from labkit_course.show.figures import COLOURS, INK
from labkit_course.show.plots import dot_style, finish, in_house_style, note

Dot = tuple[float, float, float]  # difference, low, high


@in_house_style
def difference_plot(
    ax,
    rows: Sequence[str],
    series: Mapping[str, Sequence[Dot | None]],
    *,
    xlabel: str,
    title: str = "",
    scale: float = 1.0,
) -> None:
    """Draw series[name][row]: a difference with its interval, or None; at most four series."""
    if len(series) > len(COLOURS):
        raise BadRequest(
            f"{len(series)} series are too many; a plot has at most {len(COLOURS)}, so draw two plots."
        )
    if any(len(dots) != len(rows) for dots in series.values()):
        raise BadRequest(
            f"A series has another length than the {len(rows)} rows; give one dot or None for each."
        )
    ax.axvline(0, color=INK, linewidth=1.0)
    step = 0.7 / len(series)
    for index, (name, dots) in enumerate(series.items()):
        colour, label = COLOURS[index], name
        for row, dot in enumerate(dots):
            if dot is None:
                continue
            value, low, high = (scale * x for x in dot)
            y = row + (index - (len(series) - 1) / 2) * step
            decided = low > 0 or high < 0
            ax.plot([low, high], [y, y], color=colour, linewidth=1.6)
            face = {"markerfacecolor": colour if decided else "white", "markersize": 6.5}
            ax.plot(value, y, label=label, **dot_style(index), **face)
            label = None
    ax.set_yticks(range(len(rows)), rows)
    ax.invert_yaxis()
    finish(ax, xlabel, "", title)
    ax.grid(visible=False, axis="y")
    ax.legend(loc="best")


@in_house_style
def sample_plot(
    ax,
    sizes: Sequence[int],
    differences: Sequence[float],
    marked: Mapping[str, tuple[int, float]],
    *,
    claims: Mapping[str, float],
) -> None:
    """Draw the smallest difference [points] that a number of items can show.

    `marked` are sets of items as dots, `claims` are lines.
    """
    ax.plot(sizes, [100 * d for d in differences], color=COLOURS[0], label="can be shown at best")
    for index, (name, (n, d)) in enumerate(marked.items()):
        ax.plot(n, 100 * d, label=name, markersize=8, **dot_style(1 + index % 3))
    for name, points in claims.items():
        ax.axhline(points, color="#888888", linewidth=1.0, linestyle=":")
        note(ax, name, (sizes[-1], points), (-4, 3))
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    finish(ax, "items that both runs answer", "smallest difference [points]", "")
    ax.legend(loc="lower left")
