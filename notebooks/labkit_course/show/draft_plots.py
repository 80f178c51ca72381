"""Show which tokens of a text were drafted, and how many each pass accepted.

`coloured`: the text as static HTML; drafted tokens are underlined, so no colour is needed.
`pass_plot`: one bar per target pass: accepted and rejected tokens, and the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from labkit.errors import BadRequest
from labkit_course.show.figures import COLOURS, FAINT
from labkit_course.show.plots import finish, in_house_style

KEPT = "background:#cfe3ef;border-bottom:2px solid #3d8eb9"  # light under dark text: also readable in a dark theme
OWN = "background:#f6e3b5"


def coloured(pieces: Sequence[str], drafted: Sequence[bool], title: str = "") -> str:
    """Return HTML of a text; `drafted` is true for each piece that was drafted."""
    if len(pieces) != len(drafted):
        raise BadRequest(
            f"{len(pieces)} pieces of text and {len(drafted)} origins do not match; give one of each per token."
        )
    spans = []
    for piece, kept in zip(pieces, drafted):
        shown = escape(piece).replace("\n", "↵\n")
        spans.append(
            f'<span style="{KEPT if kept else OWN};color:#222;padding:0 1px">{shown}</span>'
        )
    share = sum(drafted) / max(1, len(drafted))
    note = f"{title}: {sum(drafted)} of {len(drafted)} tokens were drafted and kept ({share:.0%}, underlined)."
    text = "".join(spans)
    return f'<p>{escape(note)}</p><pre style="white-space:pre-wrap;line-height:1.7;font-size:12px">{text}</pre>'


def show_coloured(pieces: Sequence[str], drafted: Sequence[bool], title: str = "") -> None:
    """Display the text; in a plain script, print drafted tokens in brackets."""
    try:
        from IPython.display import HTML, display
    except ImportError:
        print(
            title, "".join(f"[{piece}]" if kept else piece for piece, kept in zip(pieces, drafted))
        )
        return
    display(HTML(coloured(pieces, drafted, title)))


@in_house_style
def pass_plot(ax, passes: Sequence[tuple[int, int]], *, title: str = "") -> None:
    """Draw [(drafted, accepted), ...] as stacked bars."""
    if not passes:
        raise BadRequest("There is no pass to draw; give at least one.")
    x = range(1, len(passes) + 1)
    kept = [accepted for _, accepted in passes]
    wasted = [drafted - accepted for drafted, accepted in passes]
    ax.bar(x, kept, color=COLOURS[0], label="drafted and kept", width=0.8)
    ax.bar(x, [1] * len(passes), bottom=kept, color=COLOURS[3], label="the target's own", width=0.8)
    tops = [accepted + 1 for accepted in kept]
    ax.bar(
        x,
        wasted,
        bottom=tops,
        color="white",
        edgecolor="#888888",
        hatch="///",
        linewidth=0.6,
        label="drafted in vain",
        width=0.8,
    )
    finish(ax, "target pass", "tokens", title)
    ax.grid(visible=False, axis="x")
    ax.set_ylim(top=max(a + b for a, b in zip(tops, wasted)) * 1.45)
    ax.legend(loc="upper right", ncols=3)
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.grid(color=FAINT, axis="y")
