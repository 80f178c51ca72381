"""Notebook 06, pages and prefixes: what blocks waste, what forks hold, and copy-on-write in six lines."""

from __future__ import annotations

from labkit_course.checks.check import attempt, check, guess

LENGTHS = ([1, 16, 17, 100], [64], [5, 5, 5])


@check("Waste")
def check_waste(function) -> str | None:
    """`function(lengths, size) -> float`: the share of the slots in the blocks held that hold no token."""
    for lengths in LENGTHS:
        for size in (16, 1, 32):
            used, held = sum(lengths), sum(-(-n // size) * size for n in lengths)
            value = attempt(function, list(lengths), size)
            mistakes = {
                used / held: "That is the share in use; the waste is the rest.",
                held / used - 1: "You divided by the tokens. The waste is a share of the *slots*.",
                (held - used): "That many slots are empty; divide by all slots held.",
                1 - used / (-(-used // size) * size): (
                    "Round up each row by itself: rows do not share a block here."
                ),
                1 - used / (sum(n // size + 1 for n in lengths) * size): (
                    "A row that ends with a full block needs no further one: round up, do "
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
                named or f"{held} slots are held, of which {used} are in use."
            )
    return None


@check("Blocks of eight answers")
def check_blocks_of_forks(blocks) -> str | None:
    """A prompt of 100 tokens, forked into 8 answers of 30 tokens each, the prompt's own table released; blocks of 16."""
    return guess(
        blocks,
        6 + 8 * 3,
        {
            8 * 9: (
                "That is eight copies of everything. The six full blocks of the prompt "
                "are never written: all share them."
            ),
            7 + 8 * 2: (
                "The prompt's seventh block holds 4 tokens, and every answer writes into "
                "it: each needs its own."
            ),
            6 + 8 * 3 + 1: (
                "The last answer to write is the only holder of the old seventh block by "
                "then: it writes in place."
            ),
            6 + 8 * 2: (
                "An answer ends at token 130, in the ninth block: behind six shared ones "
                "it holds three."
            ),
            9: "Rows share blocks only where their tokens are the same.",
        },
        "Six full blocks are shared by all; behind them each answer holds its own, up to token 130.",
    )


@check("Copy-on-write")
def check_copy_on_write(function) -> str | None:
    """`function(table, length, size, holders, free) -> block`: where the next token of a row goes; changes its arguments."""
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
            return "you write into a block that another row reads as well. Where holders[block] > 1, take a fresh one."
        if what == "room in a shared block" and holders.get(4) == 2:
            return "the row has left the shared block: holders[old] must go down by one, or it is never freed."
        if what == "room in a shared block" and len(table) == 3:
            return "the fresh block *replaces* the shared one in the table; you added it behind."
        if what == "a shared block that is full" and table[:2] != [7, 4]:
            return "a full block is not written any more, so it may stay shared: only add a fresh one behind it."
        if holders.get(found) != holders_after.get(block) and found == block:
            return f"{what}: a fresh block has one holder; holders is {holders}, it should be {holders_after}."
        return (
            f"{what}: you return {found!r} with the table {table}; "
            f"it should be {block} with {table_after} (take fresh ones by free.pop())."
        )
    return None
