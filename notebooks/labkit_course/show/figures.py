"""One house style for every figure of the lab.

A figure is drawn on axes from `canvas` by the functions in `labkit_course.show.plots`. `figure`
saves it in the run's folder and shows it with its caption. Every figure needs a description for
readers who cannot see it, and a caption that gives the number of measurements. Curves differ in
lightness, marker *and* dash, so a greyscale print loses nothing.
"""

import io
import os
import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from labkit.errors import BadRequest

# Dark to light, about 20 steps of CIE lightness apart: the order survives a greyscale printer.
COLOURS = ("#14213d", "#a4243b", "#3d8eb9", "#e9b44c")
MARKERS = ("o", "s", "^", "D")
DASHES = ("-", "--", "-.", ":")
INK, FAINT = "#222222", "#d9d9d9"

STYLE = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "font.family": "DejaVu Sans",  # travels with matplotlib: the same picture on every machine
}

PALETTE_SIZE = 96
PIXELS_PER_INCH = 110
_NAME = re.compile(r"[a-z0-9_]+")
_SAYS_HOW_MANY = re.compile(r"\bn\s*=\s*[\d,]+|\bcomputed\b", re.IGNORECASE)


def run_folder() -> Path:
    """Return the folder of this run: `LABKIT_RUN_DIR` under `labkit run`, else `runs/notebook`."""
    return Path(os.environ.get("LABKIT_RUN_DIR") or Path("runs") / "notebook")


def canvas(columns: int = 1, *, width: float = 7.4, height: float = 3.7):
    """Return an empty figure with `columns` axes next to each other, and those axes.

    It is made without pyplot, so nothing is registered, shown twice or left open.
    """
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(width, height), dpi=PIXELS_PER_INCH, layout="constrained")
        axes = [fig.add_subplot(1, columns, i + 1) for i in range(columns)]
    return fig, axes[0] if columns == 1 else axes


def curve_style(index: int) -> dict:
    """Return colour, marker and dash of the curve number `index`; a plot has at most four."""
    if not 0 <= index < len(COLOURS):
        raise BadRequest(
            f"Curve {index + 1} is too many; a plot has at most {len(COLOURS)}, so draw two plots."
        )
    return {"color": COLOURS[index], "marker": MARKERS[index], "linestyle": DASHES[index]}


def png(fig: Figure) -> bytes:
    """Return the figure as PNG bytes without a date: equal figures give equal files.

    A palette takes a third of the bytes, because the house style has few colours.
    """
    full, small = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context(STYLE):
        fig.savefig(full, format="png", dpi=PIXELS_PER_INCH)
    said = PngInfo()
    said.add_text("Software", "labkit")
    Image.open(full).convert("RGB").quantize(PALETTE_SIZE).save(
        small, format="PNG", optimize=True, pnginfo=said
    )
    return small.getvalue()


def figure(fig: Figure, name: str, *, alt: str, caption: str) -> None:
    """Save `fig` as `figures/NAME.png` in the run's folder and show it with `alt` and `caption`.

    The description is the image's `alt` text. It is repeated, folded, under the caption, because
    JupyterLab and Colab drop it from images.
    """
    _check_words(name, alt, caption)
    path = run_folder() / "figures" / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = png(fig)
    path.write_bytes(data)
    _show(data, alt, caption)


def _check_words(name: str, alt: str, caption: str) -> None:
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"the figure's name is {name!r}; use lowercase letters, digits and _, because it becomes a file name."
        )
    if len(alt.split()) < 6:
        raise BadRequest(
            f"figure {name!r} has the description {alt!r}; a reader who cannot see it needs at "
            "least a sentence: say what is drawn and what it shows"
        )
    if not _SAYS_HOW_MANY.search(caption):
        raise BadRequest(
            f"the caption of figure {name!r} does not say how many measurements it shows: "
            "write 'n = 5' with the interval, or 'computed' where nothing was measured"
        )


def _show(data: bytes, alt: str, caption: str) -> None:
    try:
        from IPython.display import Image as Shown
        from IPython.display import Markdown, display
    except ImportError:  # a script without IPython still has the file
        return
    image = Shown(data=data, format="png", alt=alt)
    display(image)
    folded = f"<details><summary>The figure in words</summary>{alt}</details>"
    display(Markdown(f"*{caption}*\n\n{folded}"))
