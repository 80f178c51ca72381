"""Notebook 06, pages and prefixes: waste in blocks, blocks of forks, and copy-on-write."""

from __future__ import annotations

from labkit_course.checks.check import attempt, check, guess

LENGTHS = ([1, 16, 17, 100], [64], [5, 5, 5])


@check("Waste")
def check_waste(function) -> str | None:
    """Check `function(lengths, size) -> float`: the share of allocated slots without a token."""
    for lengths in LENGTHS:
        for size in (16, 1, 32):
            used, held = sum(lengths), sum(-(-n // size) * size for n in lengths)
            value = attempt(function, list(lengths), size)
            mistakes = {
                used / held: "That is the share in use; the waste is 1 minus it.",
                held / used - 1: "You divided by the tokens. The waste is a share of the *slots*.",
                (held - used): "That is the number of empty slots; divide by all allocated slots.",
                1 - used / (-(-used // size) * size): (
                    "Round up for each row, because rows do not share a block here."
                ),
                1 - used / (sum(n // size + 1 for n in lengths) * size): (
                    "A row that ends with a full block needs no further block; round up, do "
                    "not add one."
                ),
                1 - used / (max(-(-n // size) for n in lengths) * size * len(lengths)): (
                    "That is padding to the longest row. Each row takes its own number of blocks."
                ),
            }
            if abs(value - (1 - used / held)) < 1e-9:
                continue
            named = next(
                (words for wrong, words in mistakes.items() if abs(value - wrong) < 1e-9), None
            )
            return f"for {lengths} and blocks of {size} you return {value}. " + (
                named or f"{held} slots are allocated, and {used} of them are in use."
            )
    return None


@check("Blocks of eight answers")
def check_blocks_of_forks(blocks) -> str | None:
    """Check how many blocks of 16 tokens eight answers take.

    A prompt of 100 tokens is forked into 8 answers of 30 tokens each. The prompt's own
    table is released.
    """
    return guess(
        blocks,
        6 + 8 * 3,
        {
            8 * 9: (
                "That is eight copies of everything. All answers share the six full blocks "
                "of the prompt, because nobody writes to them."
            ),
            7 + 8 * 2: (
                "The prompt's seventh block has 4 tokens, and every answer writes into "
                "it, so each needs its own."
            ),
            6 + 8 * 3 + 1: (
                "The last answer that writes is the only one that still uses the old seventh "
                "block, so it writes in place."
            ),
            6 + 8 * 2: (
                "An answer ends at token 130, in the ninth block. After six shared blocks "
                "it has three of its own."
            ),
            9: "Rows share a block only if their tokens in it are equal.",
        },
        "All answers share six full blocks; after them, each has its own, up to token 130.",
    )


@check("Copy-on-write")
def check_copy_on_write(function) -> str | None:
    """Check `function(table, length, size, holders, free) -> block`.

    It returns the block of a row's next token and updates its arguments.
    """
    cases = [
        ("room in a block of its own", [7, 4], 6, {7: 2, 4: 1}, [9, 8], 4, [7, 4], {7: 2, 4: 1}),
        ("room in a shared block", [7, 4], 6, {7: 2, 4: 2}, [9, 8], 8, [7, 8], {7: 2, 4: 1, 8: 1}),
        (
            "a shared block that is full",
            [7, 4],
            8,
            {7: 2, 4: 2},
            [9, 8],
            8,
            [7, 4, 8],
            {7: 2, 4: 2, 8: 1},
        ),
        ("an empty row", [], 0, {}, [3], 3, [3], {3: 1}),
    ]
    for what, table, length, holders, free, block, table_after, holders_after in cases:
        table, holders, free = list(table), dict(holders), list(free)
        found = attempt(function, table, length, 4, holders, free)
        holders = {key: count for key, count in holders.items() if count}
        if (found, table, holders) == (block, table_after, holders_after):
            continue
        if what == "room in a shared block" and found == 4:
            return "you write into a block that another row reads too. If holders[block] > 1, take a new block."
        if what == "room in a shared block" and holders.get(4) == 2:
            return "the row no longer uses the shared block; subtract 1 from holders[old], or it is never freed."
        if what == "room in a shared block" and len(table) == 3:
            return "the new block *replaces* the shared one in the table; you appended it."
        if what == "a shared block that is full" and table[:2] != [7, 4]:
            return "nobody writes to a full block, so it stays shared; append a new block."
        if holders.get(found) != holders_after.get(block) and found == block:
            return f"{what}: a new block has one holder; holders is {holders} and should be {holders_after}."
        return (
            f"{what}: you return {found!r} with the table {table}; "
            f"it should be {block} with {table_after} (take new blocks with free.pop())."
        )
    return None
