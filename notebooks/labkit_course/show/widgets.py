"""A slider below a static figure.

The static figure is always shown with its caption. The slider is shown only if it can be moved, so
not under `labkit run`, on GitHub, or without ipywidgets. Only widgets that are equal in ipywidgets
7 (Colab) and 8 are used. The runner makes no widget, so no widget state is saved.
"""

import os
from collections.abc import Callable, Sequence

from labkit.errors import BadRequest
from labkit_course.show.figures import figure, png


def can_slide() -> bool:
    """Return True if a slider can be moved: with ipywidgets, and not under the runner."""
    if os.environ.get("LABKIT_RUN_DIR") or os.environ.get("LABKIT_STATIC"):
        return False
    try:
        import ipywidgets  # noqa: F401
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None


def slider(
    draw: Callable, values: Sequence, *, start, label: str, name: str, alt: str, caption: str
):
    """Show `draw(start)` as the figure `name`, and a slider over `values` that redraws it.

    `draw(value)` returns a matplotlib figure and shows nothing. Returns the slider, or None if
    it cannot be moved.
    """
    values = list(values)
    if start not in values:
        raise BadRequest(f"The slider starts at {start!r}; choose one of {values}.")
    figure(draw(start), name, alt=alt, caption=caption)
    if not can_slide():
        return None
    import ipywidgets
    from IPython.display import Image, display

    handle = ipywidgets.SelectionSlider(
        options=values,
        value=start,
        description=label,
        continuous_update=False,
        style={"description_width": "initial"},
        layout={"width": "420px"},
    )

    def redraw(value) -> None:
        display(Image(data=png(draw(value)), format="png"))

    shown = ipywidgets.interactive_output(redraw, {"value": handle})
    display(ipywidgets.VBox([handle, shown]))
    return handle
