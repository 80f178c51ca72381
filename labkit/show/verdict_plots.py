"""What a change costs, on several kinds of task at once: a dot with its interval, filled where the sample decides.

A hollow dot is no proof of no change: its interval says how large a change could hide there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.errors import BadRequest
from labkit.show.figures import COLOURS, INK, MARKERS
from labkit.show.plots import finish, in_house_style

Dot = tuple[float, float, float]  # difference, low, high


@in_house_style
def difference_plot(ax, rows: Sequence[str], series: Mapping[str, Sequence[Dot | None]], *, xlabel: str,
                    title: str = "", scale: float = 1.0) -> None:  # fmt: skip
    """series[name][row]: a difference and its interval, or None; at most four series, one row a kind of task."""
    if len(series) > len(COLOURS):
        raise BadRequest(f"{len(series)} series were given; a readable plot holds at most {len(COLOURS)}: draw two")
    if any(len(dots) != len(rows) for dots in series.values()):
        raise BadRequest(f"a series has another number of dots than there are rows ({len(rows)}): give one or None for each")
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
            ax.plot(value, y, marker=MARKERS[index], color=colour, linestyle="none", label=label,
                    markerfacecolor=colour if decided else "white", markersize=6.5)  # fmt: skip
            label = None
    ax.set_yticks(range(len(rows)), rows)
    ax.invert_yaxis()
    finish(ax, xlabel, "", title)
    ax.grid(visible=False, axis="y")
    ax.legend(loc="best")


@in_house_style
def sample_plot(ax, sizes: Sequence[int], differences: Sequence[float], marked: Mapping[str, tuple[int, float]], *,
                claims: Mapping[str, float]) -> None:  # fmt: skip
    """The smallest difference that so many items can show [points], sets of items on it, and claims as lines."""
    ax.plot(sizes, [100 * d for d in differences], color=COLOURS[0], label="can be shown at best")
    for index, (name, (n, d)) in enumerate(marked.items()):
        ax.plot(n, 100 * d, marker=MARKERS[1 + index % 3], color=COLOURS[1 + index % 3], linestyle="none", markersize=8, label=name)
    for name, points in claims.items():
        ax.axhline(points, color="#888888", linewidth=1.0, linestyle=":")
        ax.annotate(name, (sizes[-1], points), xytext=(-4, 3), textcoords="offset points", ha="right", fontsize=9)
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    finish(ax, "items that both runs answer", "smallest difference [points]", "")
    ax.legend(loc="lower left")
