"""Notebook 14, the last mile: the limit of memory, packed codes, and a faster part of a step."""

from __future__ import annotations

from labkit_course.checks.check import attempt, check, guess


@check("The limit of memory")
def check_memory_limit(tokens_per_s) -> str | None:
    """Check the maximum tok/s for 1.5e9 weights of 5 bits at 32 GB/s."""
    right = 32e9 / (1.5e9 * 5 / 8)
    mistakes = {
        right / 8: "Five *bits* are 5/8 of a byte.",
        right * 5 / 4: "The scale and the minimum are read too: 5 bits per weight, not 4.",
        32e9 / 1.5e9: "That is one byte per weight; here it is five bits.",
        1 / right: "Those are the seconds per token; give the inverse.",
    }
    return guess(
        tokens_per_s,
        right,
        mistakes,
        "Divide the bytes per second by the bytes that one token reads.",
    )


def _codes(seed: int) -> list[list[int]]:
    return [
        [(seed + 7 * row + 5 * column + column * column // 3) % 16 for column in range(32)]
        for row in range(16)
    ]


def _line(codes, i: int) -> list[int]:
    return [
        codes[row][4 * i + c] | codes[row][16 + 4 * i + c] << 4
        for row in range(16)
        for c in range(4)
    ]


@check("A line of packed codes")
def check_packed_line(function) -> str | None:
    """Check `function(codes, i) -> 64 bytes`: line i of a block of 16 rows x 32 columns."""
    for seed, i in ((0, 0), (5, 2), (11, 3)):
        codes = _codes(seed)
        found = [int(byte) for byte in attempt(function, [list(row) for row in codes], i)]
        right = _line(codes, i)
        if found == right:
            continue
        if len(found) != 64:
            return f"a line has 64 bytes, 16 rows of 4; you return {len(found)}."
        by_column = [
            codes[row][4 * i + c] | codes[row][16 + 4 * i + c] << 4
            for c in range(4)
            for row in range(16)
        ]
        swapped = [byte >> 4 | (byte & 15) << 4 for byte in right]
        neighbours = [
            codes[row][8 * i + 2 * c] | codes[row][8 * i + 2 * c + 1] << 4
            for row in range(16)
            for c in range(4)
        ]
        if found == by_column:
            return "that is column by column; the four columns of a row are neighbours, because one instruction adds four bytes."
        if found == swapped:
            return "the halves of each byte are swapped: column 4i + c is in the low four bits."
        if found == neighbours:
            return "that puts neighbours into one byte; a byte has column 4i + c and column 16 + 4i + c, so that one mask gives four neighbours."
        wrong = next(at for at in range(64) if found[at] != right[at])
        return f"for line {i}, byte {wrong} (row {wrong // 4}, column {wrong % 4} of four) should be {right[wrong]}, not {found[wrong]}."
    return None


@check("A part for free")
def check_part_for_free(ratio) -> str | None:
    """Check how many times faster a step becomes.

    It takes 2.4 ms, and its products (1.2 ms) become 2.5 times faster.
    """
    right = 2.4 / (1.2 + 1.2 / 2.5)
    mistakes = {
        2.5: "Only half of the step becomes faster.",
        2.0: "That is the limit if products take no time.",
        1.75: "Do not average speed-ups; add seconds.",
        1 / right: "That is new over old; give the inverse.",
    }
    return guess(ratio, right, mistakes, "Divide old seconds by new: 2.4 / (1.2 + 1.2 / 2.5).")
