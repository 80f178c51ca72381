"""Plot what a KV cache stores: sizes by token and channel, attention by question and line.

`channels_plot`: sizes [tokens, channels] as greys; a large channel is a dark column, a large
token a dark row. `attention_plot`: weights [questions, lines], with a ring around the line of
each answer. Both print well in greyscale.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.errors import BadRequest
from labkit_course.show.figures import COLOURS
from labkit_course.show.plots import finish, in_house_style


@in_house_style
def channels_plot(
    ax, sizes: Sequence[Sequence[float]], *, title: str = "", most: float | None = None
) -> None:
    """Draw sizes[token][channel], none below 0; `most` is black (default: the largest)."""
    if not len(sizes) or min(min(row) for row in sizes) < 0:
        raise BadRequest("The plot shows sizes; give absolute values of at least one token.")
    ax.imshow(sizes, cmap="Greys", aspect="auto", vmin=0, vmax=most, interpolation="nearest")
    finish(ax, "channel", "token", title)
    ax.grid(visible=False)


@in_house_style
def attention_plot(
    ax, weights: Sequence[Sequence[float]], answers: Sequence[int], *, most: float, title: str = ""
) -> None:
    """Draw weights[question][line]; `answers[question]` is the line with the answer."""
    if len(weights) != len(answers):
        raise BadRequest(
            f"{len(weights)} rows of weights and {len(answers)} answers do not match; give one answer per row."
        )
    ax.imshow(weights, cmap="Greys", aspect="auto", vmin=0, vmax=most, interpolation="nearest")
    ax.plot(
        answers,
        range(len(answers)),
        "s",
        markersize=7,
        markerfacecolor="none",
        markeredgecolor=COLOURS[1],
        clip_on=False,
    )
    ax.set_yticks(range(len(answers)), [str(i + 1) for i in range(len(answers))])
    finish(ax, "line of the text", "question", title)
    ax.grid(visible=False)
