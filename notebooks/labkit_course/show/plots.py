"""Draw the four plots of the lab on axes from `labkit_course.show.figures.canvas`.

`band_plot`: curves over a quantity; measured with their spread, predicted as thin lines.
`bar_plot`: one value per arm, with its interval. `roofline_plot`: what a machine can reach, and
work below it. `prediction_plot`: measured over predicted, with the band of the tolerance.
All take numbers in base units (seconds, bytes) and a `scale` for the axis.
"""

from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.ticker import LogLocator

from labkit.errors import BadRequest
from labkit_course.show.figures import COLOURS, FAINT, INK, MARKERS, STYLE, curve_style
from labkit_course.show.tables import short

# A decorator: titles and legends take their look when they are made.
in_house_style = rc_context(STYLE)


@in_house_style
def band_plot(
    ax,
    x: Sequence[float],
    measured: Mapping[str, Sequence],
    predicted: Mapping[str, Sequence[float]] | None = None,
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    scale: float = 1.0,
) -> None:
    """Draw curves over `x`. A measured point is a number or (middle, low, high); a prediction is a line.

    A prediction carries the colour of the measurement of the same name and no marker.
    """
    predicted = predicted or {}
    names = list(dict.fromkeys([*measured, *predicted]))
    for index, name in enumerate(names):
        style = curve_style(index)
        if name in measured:
            points = [_triple(point, scale) for point in measured[name]]
            _same_length(name, x, points)
            middle, low, high = zip(*points, strict=True)
            alone = name not in predicted
            line = style if alone else {**style, "linestyle": "none"}
            ax.plot(x, middle, label=f"{name}, measured" if predicted else name, **line)
            if alone:
                ax.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
            else:
                ax.vlines(x, low, high, color=style["color"], linewidth=1.2)
        if name in predicted:
            _same_length(name, x, predicted[name])
            values = [value * scale for value in predicted[name]]
            line = {"color": style["color"], "linestyle": style["linestyle"]}
            ax.plot(x, values, linewidth=1.2, label=f"{name}, predicted", **line)
    finish(ax, xlabel, ylabel, title)
    ax.set_ylim(bottom=0)
    if len(names) > 1 or predicted:
        ax.legend(loc="best")


@in_house_style
def bar_plot(
    ax, values: Mapping[str, object], *, xlabel: str, title: str = "", scale: float = 1.0
) -> None:
    """Draw horizontal bars: a number, or (value, low, high) with the interval as a whisker."""
    names = list(values)
    triples = [_triple(values[name], scale) for name in names]
    rows = range(len(names))
    reach = max((high for _, _, high in triples), default=0.0)
    ax.barh(rows, [value for value, _, _ in triples], color=COLOURS[2], height=0.62)
    for row, (value, low, high) in zip(rows, triples, strict=True):
        if high > low:
            ax.plot([low, high], [row, row], color=INK, linewidth=1.4, marker="|")
        ax.text(max(value, high) + 0.015 * reach, row, short(value), va="center", fontsize=9)
    ax.set_yticks(list(rows), names)
    ax.invert_yaxis()
    ax.set_xlim(0, reach * 1.15 or 1.0)
    finish(ax, xlabel, "", title)
    ax.grid(visible=False, axis="y")


@in_house_style
def roofline_plot(
    ax,
    bandwidth: float,
    flops: float,
    dots: Mapping[str, tuple[float, float]],
    *,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    title: str = "",
) -> None:
    """Draw attainable FLOP/s over arithmetic intensity.

    `dots` are {name: (FLOP/byte, FLOP/s)}; `bounds` are drawn as crosses.

    roof(intensity) = min(flops, bandwidth * intensity)   [Williams, Waterman, Patterson 2009]
    """
    ridge = flops / bandwidth
    intensities = [at for at, _ in dots.values()] + [ridge]
    left, right = min(intensities) / 3, max(intensities) * 4
    roof = [bandwidth * left / 1e9, flops / 1e9, flops / 1e9]
    ax.plot([left, ridge, right], roof, color=INK, linewidth=2.2)
    ax.axvline(ridge, color="#888888", linewidth=0.9, linestyle=":")
    note(ax, f"ridge: {ridge:.1f} FLOP/B", (ridge, flops / 1e9), (-6, 5))
    for index, (name, (intensity, reached)) in enumerate(dots.items()):
        style = dot_style(index) | {"markersize": 8}
        ax.plot(intensity, reached / 1e9, label=name, **style)
    cross = {"marker": "x", "color": INK, "markersize": 10, "markeredgewidth": 2}
    for name, (intensity, reachable) in (bounds or {}).items():
        ax.plot(intensity, reachable / 1e9, linestyle="none", label=name, **cross)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=10)
    ax.set_ylim(top=flops / 1e9 * 2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    finish(ax, "arithmetic intensity [FLOP/B]", "arithmetic reached [GFLOP/s]", title)
    ax.legend(loc="lower right")


@in_house_style
def prediction_plot(
    ax,
    points: Mapping[str, Sequence[tuple[float, float]]],
    *,
    unit: str,
    tolerance: float = 0.15,
    title: str = "",
    scale: float = 1.0,
) -> None:
    """Draw measured over predicted, {series: [(predicted, measured), …]}; the diagonal is exact."""
    every = [value * scale for series in points.values() for pair in series for value in pair]
    if not every or min(every) <= 0:
        raise BadRequest(
            "A prediction plot needs at least one pair and values above 0; check the values."
        )
    low, high = min(every) / 1.6, max(every) * 1.6
    ends = (low, high)
    bottom, top = ([end * (1 + side * tolerance) for end in ends] for side in (-1, 1))
    band = {"color": FAINT, "alpha": 0.7, "linewidth": 0}
    ax.fill_between(ends, bottom, top, label=f"within {tolerance:.0%}", **band)
    ax.plot(ends, ends, color=INK, linewidth=1.0)
    for index, (name, series) in enumerate(points.items()):
        predicted, measured = zip(*series)
        style = {**curve_style(index), "linestyle": "none"}
        x, y = ([scale * value for value in values] for values in (predicted, measured))
        ax.plot(x, y, label=name, **style)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(ends)
    ax.set_ylim(ends)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(lambda value, _: "")
    finish(ax, f"predicted [{unit}]", f"measured [{unit}]", title)
    ax.legend(loc="upper left")


def _triple(point, scale: float) -> tuple[float, float, float]:
    """Return (middle, low, high) of a number, a triple, or a `labkit.lab.measure` timing."""
    if hasattr(point, "median_s"):
        point = (point.median_s, point.low_s, point.high_s)
    elif not isinstance(point, Sequence):
        point = (point, point, point)
    middle, low, high = point
    return middle * scale, low * scale, high * scale


def _same_length(name: str, x: Sequence, points: Sequence) -> None:
    if len(x) != len(points):
        raise BadRequest(
            f"curve {name!r} has {len(points)} points for {len(x)} places on the x axis: give one "
            "point for each"
        )


def dot_style(index: int) -> dict:
    """Return colour and marker of the dot number `index`, without a line."""
    which = index % len(COLOURS)
    return {"marker": MARKERS[which], "color": COLOURS[which], "linestyle": "none"}


def note(ax, text: str, place: tuple[float, float], offset: tuple[int, int]) -> None:
    """Write `text` to the left of a place, moved by `offset` points."""
    style = {"textcoords": "offset points", "ha": "right", "fontsize": 9}
    ax.annotate(text, place, xytext=offset, **style)


def finish(ax, xlabel: str, ylabel: str, title: str) -> None:
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.set_title(title)
