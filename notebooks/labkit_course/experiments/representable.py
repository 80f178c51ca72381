"""List every number that a format can represent, for a group with largest weight `reach`.

    symmetric integers   reach / (2^(bits-1) - 1) * code,  code = -(2^(bits-1) - 1) .. 2^(bits-1) - 1
    offset integers      low + (high - low) / (2^bits - 1) * code,  2^bits values
    e4m3, e2m1           sign * 2^(exponent - bias) * (1 + mantissa / 2^m), subnormals below

Integers are evenly spaced, which is good if weights fill their range. Floats are dense near zero,
which is good if most weights are small. A group shares a scale, so one outlier spreads all values
of its group.
"""

from __future__ import annotations

from labkit.errors import BadRequest
from labkit.formats.names import NumberFormat, get_format

E4M3_MAX, E2M1_MAX = 448.0, 6.0


def representable(
    format: str | NumberFormat, low: float = -1.0, high: float = 1.0
) -> tuple[float, ...]:
    """Return the sorted values of a group whose weights are between `low` and `high`."""
    format = get_format(format)
    if not low <= 0 <= high or low == high:
        raise BadRequest(
            f"The range is {low} to {high}; give a range that includes 0 and is not empty."
        )
    reach = max(-low, high)
    if format.kind == "integer":
        if format.symmetric:
            top = (1 << (format.bits - 1)) - 1
            return tuple(reach * code / top for code in range(-top, top + 1))
        levels = (1 << format.bits) - 1
        start = 0.0 if format.offset != "zero_point" else round(-low / (high - low) * levels)
        if format.offset == "zero_point":  # 0 itself is a value
            return tuple((high - low) / levels * (code - start) for code in range(levels + 1))
        return tuple(low + (high - low) / levels * code for code in range(levels + 1))
    if format.name == "fp8_e4m3":
        return _both(_small_float(4, 3, 7), reach / E4M3_MAX, E4M3_MAX)
    if format.name == "nvfp4":
        return _both(_small_float(2, 1, 1), reach / E2M1_MAX, E2M1_MAX)
    raise BadRequest(
        f"{format.name} has too many numbers for a list; choose an integer format, fp8_e4m3 or nvfp4."
    )


def _small_float(exponent_bits: int, mantissa_bits: int, bias: int) -> list[float]:
    """Return the numbers of a small float from zero up, subnormals included."""
    steps = 1 << mantissa_bits
    below = [mantissa / steps * 2.0 ** (1 - bias) for mantissa in range(steps)]
    above = [
        2.0 ** (exponent - bias) * (1 + mantissa / steps)
        for exponent in range(1, 1 << exponent_bits)
        for mantissa in range(steps)
    ]
    return below + above


def _both(values: list[float], scale: float, largest: float) -> tuple[float, ...]:
    """Add the negatives; codes above the largest number mean NaN and are left out."""
    kept = [value * scale for value in values if value <= largest]
    return tuple(sorted({*kept, *(-value for value in kept)}))
