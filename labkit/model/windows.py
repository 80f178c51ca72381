"""Which layers attend to a window only, as Mistral and Qwen configurations say it in their different ways."""

from __future__ import annotations


def layer_windows(architecture: str, given: dict, layers: int) -> tuple[int | None, ...] | None:
    """`given`: a config.json with its architecture's defaults. None: no layer has a window."""
    window = given.get("sliding_window")
    if window is None or architecture == "llama":
        return None
    if architecture == "mistral":
        return (window,) * layers
    if not given.get("use_sliding_window", False):
        return None
    kinds = given.get("layer_types")
    if kinds is None:
        first = given.get("max_window_layers", 28)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else None
