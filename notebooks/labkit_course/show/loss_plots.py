"""Plot the loss of fewer bits: KL over bits per weight, and a map of sensitivity.

`bits_loss_plot`: one series per method, points with intervals, KL on a logarithmic axis.
`map_plot`: a matrix of numbers, dark if large, each cell labelled with its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log

from labkit.errors import BadRequest
from labkit_course.show.figures import COLOURS, DASHES, MARKERS
from labkit_course.show.plots import finish, in_house_style
from labkit_course.show.tables import short

Point = tuple[float, tuple[float, float, float]]  # bits, (KL, low, high)


@in_house_style
def bits_loss_plot(
    ax,
    series: Mapping[str, Sequence[Point]],
    *,
    ylabel: str = "KL [nats per token]",
    xlabel: str = "bits a weight, all-in",
    title: str = "",
    joined: bool = True,
) -> None:
    """Draw {name: [(bits, (KL, low, high)), …]}, at most four series; `joined` adds lines."""
    if len(series) > len(COLOURS):
        raise BadRequest(
            f"{len(series)} series are too many; a plot has at most {len(COLOURS)}, so draw two."
        )
    points = [point for one in series.values() for point in one]
    if not points or min(point[1][0] for point in points) <= 0:
        raise BadRequest(
            "A KL is not above 0, and the axis is logarithmic; leave out points without loss."
        )
    for index, (name, one) in enumerate(series.items()):
        one = sorted(one)
        bits = [at for at, _ in one]
        middle, low, high = zip(*(triple for _, triple in one), strict=True)
        line = DASHES[index] if joined and len(one) > 1 else "none"
        ax.plot(
            bits, middle, color=COLOURS[index], marker=MARKERS[index], linestyle=line, label=name
        )
        ax.vlines(
            bits, [max(value, 1e-9) for value in low], high, color=COLOURS[index], linewidth=1.2
        )
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    finish(ax, xlabel, ylabel, title)
    ax.legend(loc="best")


@in_house_style
def map_plot(
    ax,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
) -> None:
    """Draw values[row][column], all above 0, shaded by their logarithm."""
    if len(values) != len(rows) or any(len(row) != len(columns) for row in values):
        raise BadRequest(
            f"the map has {len(rows)} rows and {len(columns)} columns, but its values have another shape; give one value per cell."
        )
    smallest = min(value for row in values for value in row)
    if smallest <= 0:
        raise BadRequest(
            "A value of the map is not above 0; give values above 0, because the shades are logarithmic."
        )
    shades = [[log(value) for value in row] for row in values]
    ax.imshow(shades, cmap="Greys", aspect="auto")
    flat = [shade for row in shades for shade in row]
    middle = (min(flat) + max(flat)) / 2  # darker cells have white text
    size = 9 if len(columns) <= 10 else 5.5
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            ink = "white" if shades[y][x] > middle else "black"
            ax.text(x, y, short(value), ha="center", va="center", color=ink, fontsize=size)
    ax.set_xticks(range(len(columns)), columns, rotation=0 if len(columns) <= 10 else 90)
    ax.set_yticks(range(len(rows)), rows)
    finish(ax, xlabel, ylabel, title)
    ax.grid(visible=False)
