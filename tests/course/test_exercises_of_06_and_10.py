"""The checks of notebooks 06 and 10: right answers pass, and each mistake is named."""

import pytest

from labkit_course.checks import boundary, pages


def waste(lengths, size):
    held = sum(-(-n // size) * size for n in lengths)
    return 1 - sum(lengths) / held


def place(table, length, size, holders, free):
    if length % size == 0:
        table.append(free.pop())
        holders[table[-1]] = 1
    elif holders[table[-1]] > 1:
        holders[table[-1]] -= 1
        table[-1] = free.pop()
        holders[table[-1]] = 1
    return table[-1]


FIELDS = ("tenant", "scope", "weights", "adapters")


def may_share(entry, request, fields=FIELDS):
    same = all(entry[field] == request[field] for field in fields)
    return same and request["tokens"][: len(entry["tokens"])] == entry["tokens"]


def revoke(entries, document, size):
    kept = {}
    for name, entry in entries.items():
        start = entry["documents"].get(document)
        kept[name] = entry["tokens"] if start is None else start // size * size
    return kept


def test_right_answers_pass():
    assert (
        pages.check_waste(waste)
        and pages.check_blocks_of_forks(30)
        and pages.check_copy_on_write(place)
    )
    assert boundary.check_computed(32, 544, 1, 544) and boundary.check_computed((32, 544, 1, 544))
    assert boundary.check_may_share(may_share) and boundary.check_revoke(revoke)


def always_in_place(table, length, size, holders, free):
    return table[-1] if length % size else place(table, length, size, holders, free)


def forgets_to_leave(table, length, size, holders, free):
    shared = length % size and holders[table[-1]] > 1
    before = table[-1] if table else None
    block = place(table, length, size, holders, free)
    holders[before] = holders.get(before, 0) + bool(shared)
    return block


def adds_behind(table, length, size, holders, free):
    if length % size and holders[table[-1]] > 1:
        holders[table[-1]] -= 1
        table.append(free.pop())
        holders[table[-1]] = 1
        return table[-1]
    return place(table, length, size, holders, free)


@pytest.mark.parametrize(
    ("check", "answer", "named"),
    [
        (pages.check_waste, lambda n, s: 1 - waste(n, s), "share in use"),
        (pages.check_waste, lambda n, s: waste(n, s) / (1 - waste(n, s)), "share of the \\*slots"),
        (
            pages.check_waste,
            lambda n, s: 1 - sum(n) / (-(-sum(n) // s) * s),
            "Round up for each row",
        ),
        (
            pages.check_waste,
            lambda n, s: 1 - sum(n) / (len(n) * -(-max(n) // s) * s),
            "longest row",
        ),
        (pages.check_blocks_of_forks, 72, "eight copies"),
        (pages.check_blocks_of_forks, 23, "needs its own"),
        (pages.check_blocks_of_forks, 31, "writes in place"),
        (pages.check_copy_on_write, always_in_place, "another row reads"),
        (pages.check_copy_on_write, forgets_to_leave, "subtract 1 from"),
        (pages.check_copy_on_write, adds_behind, "replaces"),
        (boundary.check_computed, (32, 32, 1, 544), "another tenant"),
        (boundary.check_computed, (32, 544, 0, 544), "its logits give"),
        (boundary.check_computed, (32, 544, 1, 1), "adapter"),
        (boundary.check_computed, (32, 544), "four numbers"),
        (boundary.check_may_share, lambda a, b: may_share(a, b, FIELDS[1:]), "another tenant"),
        (
            boundary.check_may_share,
            lambda a, b: (
                may_share(a, b, FIELDS[2:]) and a["tenant"] + a["scope"] == b["tenant"] + b["scope"]
            ),
            "compare each field",
        ),
        (
            boundary.check_may_share,
            lambda a, b: may_share(a, b) and a["text"] == b["text"],
            "do not read it",
        ),
        (
            boundary.check_may_share,
            lambda a, b: may_share(a, b) and a["tokens"] == b["tokens"],
            "prefix hit",
        ),
        (
            boundary.check_may_share,
            lambda a, b: may_share(a, {**b, "tokens": a["tokens"]}),
            "weak hash",
        ),
        (
            boundary.check_revoke,
            lambda e, d, s: {n: x["tokens"] for n, x in e.items()},
            "removed completely",
        ),
        (
            boundary.check_revoke,
            lambda e, d, s: {n: x["documents"].get(d, x["tokens"]) for n, x in e.items()},
            "whole",
        ),
        (
            boundary.check_revoke,
            lambda e, d, s: {
                n: k for n, k in revoke(e, d, s).items() if d not in e[n]["documents"]
            },
            "may stay",
        ),
    ],
)
def test_mistakes_are_named(check, answer, named, capsys):
    import re

    outcome = check(answer)
    assert outcome.state == "not yet" and re.search(named, outcome.message), outcome.message
