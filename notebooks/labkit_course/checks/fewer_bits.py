"""Notebook 02, fewer bits: bits per weight, rounding a group, and the limits of the gain."""

from __future__ import annotations

from labkit.formats import get_format
from labkit_course.checks.check import attempt, check, guess

WEIGHTS, KEPT = 8_000_000_000, 1_000_000_000  # of a made-up model; KEPT of them stay in bf16
BANDWIDTH, FLOPS = 300e9, 60e12  # the made-up accelerator of notebook 00


@check("Bits a weight, all-in")
def check_bits_all_in(bits) -> str | None:
    """Check the bits per weight of INT4 in groups of 128 with an fp16 scale and a 4-bit zero point."""
    right = get_format("int4_g128_zp").bits_per_weight()
    mistakes = {
        4.0: "Those are the codes alone. Each group of 128 also stores a scale and a zero point.",
        4.125: "The scale is there, the zero point is missing: 4 more bits per group.",
        4.25: "You counted a zero point of 16 bits; it is a code of 4 bits.",
        4 + 20: "Scale and zero point are shared by the 128 weights of a group; divide them.",
        4.625: "You divided by 32; these groups have 128 weights.",
        4.3125: "You divided by 64; these groups have 128 weights.",
        right / 8: "That is in bytes; give bits.",
    }
    if abs(bits - right) < 1e-3:
        return None
    named = next((words for wrong, words in mistakes.items() if abs(bits - wrong) < 1e-3), None)
    return (
        named
        or "Add the bits of a code and the bits of scale and zero point, divided over the 128 weights."
    )


@check("Round to nearest")
def check_round_trip(function) -> str | None:
    """Check `function(weights, bits) -> list`: quantize to symmetric integers and dequantize."""
    groups = (
        [0.7, -0.2, 0.05, 0.33],
        [-1.0, -0.5, -0.25, -0.9],
        [3.0, 0.1, -0.1, 0.2],
        [0.0, 0.0, 0.0],
    )
    for weights in groups:
        for bits in (4, 8):
            try:
                value = attempt(function, list(weights), bits)
            except ZeroDivisionError:
                return "in a group of zeros the scale is 0; return the zeros."
            got = [float(x) for x in value]
            if len(got) != len(weights):
                return f"you got {len(weights)} weights and {len(got)} came out; return one number per weight."
            if got != got or any(x != x for x in got):
                return "a group of zeros gave NaN; return the zeros."
            mistake = _round_trip_mistake(weights, bits, got)
            if mistake:
                return f"for {weights} in {bits} bits you return {[round(x, 4) for x in got]}. {mistake}"
    return None


def _round_trip_mistake(weights: list[float], bits: int, got: list[float]) -> str | None:
    def held(reach: float, top: int) -> list[float]:
        return [round(w / reach * top) * reach / top if reach else 0.0 for w in weights]

    def near(want: list[float]) -> bool:
        return all(abs(a - b) < 1e-5 for a, b in zip(got, want))

    reach, top = max(map(abs, weights)), (1 << (bits - 1)) - 1
    if near(held(reach, top)):
        return None
    if max(weights) not in (0, reach) and near(held(max(weights), top)):
        return "The scale comes from the largest size; take abs before max, because weights may be negative."
    if (
        near(held(reach, (1 << bits) - 1))
        or near(held(reach, 1 << (bits - 1)))
        or near(held(reach, 1 << bits))
    ):
        return f"The largest code of {bits} signed bits is 2**({bits} - 1) - 1 = {top}."
    if near(list(weights)):
        return "Nothing was rounded."
    if near([round(w / reach * top) if reach else 0 for w in weights]):
        return "Those are the codes; multiply them by the scale again."
    if near([int(w / reach * top) * reach / top if reach else 0.0 for w in weights]):
        return "You removed the fraction; round to the nearest code."
    return "scale = max|w| / (2**(bits - 1) - 1), code = round(w / scale), result = code * scale."


@check("The most that fewer bits give")
def check_most_speedup(times) -> str | None:
    """Check the maximum speed-up of decoding.

    7 of 8 billion weights go from bf16 to 4.5 bits, and the rest stays in bf16. A step
    takes as long as its bytes.
    """
    before, small = 2 * WEIGHTS, (WEIGHTS - KEPT) * 4.5 / 8
    right = before / (small + 2 * KEPT)
    mistakes = {
        16 / 4.5: (
            "That would be all weights. A billion of them stay in bf16 and are read in every step."
        ),
        4.0: "Four times fewer bits would give 4; here scales take half a bit, and a billion weights stay.",
        before / small: "You forgot to read the billion weights in bf16.",
        before
        / ((WEIGHTS - KEPT) * 4 / 8 + 2 * KEPT): "With its scale, a weight has 4.5 bits, not 4.",
        1 / right: "That is the inverse; divide the old bytes by the new ones.",
        before / (WEIGHTS * 4.5 / 8 + 2 * KEPT): (
            "You counted the billion weights twice, in 4.5 bits and in bf16."
        ),
    }
    return guess(
        times,
        right,
        mistakes,
        "Bytes before over bytes after: 16 GB over 7e9 * 4.5 / 8 B + 1e9 * 2 B.",
    )


@check("Where fewer bits stop paying")
def check_where_it_stops(shrinks_from, gone_from) -> str | None:
    """Check the batches from which the gain of 4 bits over 16 shrinks, and is gone.

    The device has 300 GB/s and 60 TFLOP/s, and multiplies both in bf16.
    """
    ridge = FLOPS / BANDWIDTH  # operations a byte
    shrinks, gone = ridge * 0.5 / 2, ridge * 2 / 2
    wrong = guess(
        shrinks_from,
        shrinks,
        {
            gone: "First number: at that batch bf16 reaches its ridge. Weights of half a byte reach it earlier.",
            shrinks
            * 2: "First number: divide 2 operations per weight and row by half a byte per weight.",
            shrinks * 4: "First number: 4 bits are half a byte.",
        },
        "First number: find the batch at which INT4's arithmetic takes as long as its bytes: 2 B W / 60e12 = 0.5 W / 300e9.",
    )
    return wrong or guess(
        gone_from,
        gone,
        {
            shrinks: "Second number: at that batch INT4 waits for arithmetic, but bf16 still waits longer for bytes.",
            gone
            * 2: "Second number: divide 2 operations per weight and row by 2 bytes per weight.",
        },
        "Second number: both take equally long if bf16 also waits for arithmetic: 2 B W / 60e12 = 2 W / 300e9.",
    )
