"""Notebook 05, a smaller cache: bits all-in, scales per channel, and windows."""

from __future__ import annotations

import torch

from labkit.plan.kv_formats import KV_FORMATS
from labkit_course.checks.check import attempt, check

HEAD_DIM = 128  # of the exercise's model


@check("Bits a number, all-in")
def check_kv_bits(bits) -> str | None:
    """Check the bits per number of INT8 per token with head_dim 128.

    Each token and head stores a scale and a minimum in bf16.
    """
    right = 8 * KV_FORMATS["int8_token"].bytes_per_value(HEAD_DIM)
    mistakes = {
        8.0: "Those are the codes alone. Each token and head also stores a scale and a minimum.",
        8.125: "Count both a scale *and* a minimum, 16 bits each.",
        8.5: "You divided by 64; this head_dim is 128.",
        40.0: "Scale and minimum are shared by the 128 numbers of a token and head; divide them.",
        16.25: "Keys and values each have their own scales; count each number once, do not add the two.",
        right / 8: "That is in bytes; give bits.",
    }
    if abs(bits - right) < 1e-3:
        return None
    named = next((words for wrong, words in mistakes.items() if abs(bits - wrong) < 1e-3), None)
    return (
        named or "Add the bits of a code and 32 bits of scale and minimum divided by 128 numbers."
    )


def held_like(
    numbers: torch.Tensor, bits: int, dim: int | None, minimum: bool = True, top: int | None = None
) -> torch.Tensor:
    """Return `numbers` rounded to steps that are shared along `dim` (None: by all)."""
    top = (1 << bits) - 1 if top is None else top
    low = numbers.amin(dim, keepdim=True) if dim is not None else numbers.min()
    high = numbers.amax(dim, keepdim=True) if dim is not None else numbers.max()
    low = low if minimum else torch.zeros_like(low)
    scale = ((high - low) / top).clamp(min=1e-30)
    return ((numbers - low) / scale).round().clamp(0, top) * scale + low


@check("A scale per channel")
def check_per_channel(function) -> str | None:
    """Check `function(keys [T, D], bits) -> [T, D]`: a minimum and a step per channel."""
    source = torch.Generator().manual_seed(0)
    keys = torch.randn(8, 6, generator=source) * torch.tensor([1.0, 0.1, 5.0, 1.0, 0.3, 20.0]) + 2
    flat = keys.clone()
    flat[:, 3] = 1.5  # a channel that never changes
    for numbers in (keys, flat):
        for bits in (4, 2):
            value = attempt(function, numbers.clone(), bits)
            if not isinstance(value, torch.Tensor) or value.shape != numbers.shape:
                return f"return a tensor of the same shape as the keys, {tuple(numbers.shape)}."
            if value.isnan().any():
                return "a constant channel has a step of 0, and 0 / 0 is NaN; clamp the step to at least 1e-30."
            mistake = _channel_mistake(numbers, bits, value.float())
            if mistake:
                return f"in {bits} bits: {mistake}"
    return None


def _channel_mistake(numbers: torch.Tensor, bits: int, value: torch.Tensor) -> str | None:
    def near(want: torch.Tensor) -> bool:
        return torch.allclose(value, want, atol=1e-4)

    if near(held_like(numbers, bits, 0)):
        return None
    if near(held_like(numbers, bits, 1)):
        return "that is a scale per *token*. A channel is a column, so take minimum and maximum over dim 0."
    if near(held_like(numbers, bits, None)):
        return "that is one scale for everything; pass `dim=0` and `keepdim=True` to amin and amax."
    if near(held_like(numbers, bits, 0, minimum=False)):
        return "the minimum is missing: subtract it before rounding, and add it afterwards."
    if near(held_like(numbers, bits, 0, top=1 << bits)):
        return f"{bits} bits count from 0 to {(1 << bits) - 1}, so that is the number of steps from minimum to maximum."
    if near(numbers):
        return "nothing was rounded."
    low, high = numbers.amin(0), numbers.amax(0)
    codes = ((numbers - low) / ((high - low) / ((1 << bits) - 1)).clamp(min=1e-30)).round()
    if near(codes):
        return "those are the codes; multiply them by the step and add the minimum."
    return "take minimum and maximum of each column; step = (max - min) / (2**bits - 1); round((keys - min) / step) * step + min."


@check("What a window keeps")
def check_window(function) -> str | None:
    """Check `function(length, window, sinks) -> positions` that the newest token can see."""
    for length, window, sinks in (
        (10, 4, 0),
        (10, 4, 2),
        (3, 4, 2),
        (5, 4, 2),
        (7, 3, 5),
        (1, 1, 0),
    ):
        right = [s for s in range(length) if s > length - 1 - window or s < sinks]
        found = attempt(function, length, window, sinks)
        value = [int(position) for position in found]
        if sorted(value) == right:
            continue
        said = f"for length {length}, window {window}, sinks {sinks} you return {value}. "
        if len(value) != len(set(value)):
            return said + "A token occurs twice, because sinks and window may overlap."
        if any(not 0 <= position < length for position in value):
            return said + f"Positions go from 0 to {length - 1}."
        if sorted(value) == [s for s in range(length) if s >= length - 1 - window or s < sinks]:
            return said + "The window includes the newest token, so it starts one later."
        if sorted(value) == [s for s in range(length) if s > length - 1 - window]:
            return said + "The sinks are missing: the first tokens always stay."
        if sorted(value) == [
            s for s in range(length) if s > length - 1 - max(window - sinks, 0) or s < sinks
        ]:
            return said + "Sinks stay next to the window; they do not take places in it."
        return said + "Position s is visible if s > length - 1 - window or s < sinks."
    return None
