"""Combine small programming tasks from parts: signature, docstring, often an example.

"Return the {sum} of the numbers that are {even}": every result with every predicate,
over numbers, words and characters, in several styles of docstring. The parts are in
data/invented_tasks.yaml. A draft model learns from them how functions usually begin. No
evaluation contains any of the tasks. The examples are correct.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from random import Random

from labkit.files import data_path

OPENERS = ("Return", "Compute", "Find", "Given the input, return", "Write a function that returns")
STYLES = (
    '    """ {doc}\n{example}    """\n',
    '    """{doc}\n{example}    """\n',
    "    '''\n    {doc}\n{example}    '''\n",
    '    """\n    {doc}\n\n{example}    """\n',
    "    # {doc}\n",
)


@cache
def _families() -> dict[str, dict]:
    """Return the parts by parameter, such as `text: str`."""
    import yaml

    families = yaml.safe_load(data_path("invented_tasks.yaml").read_text(encoding="utf-8"))
    for family in families.values():
        for table in ("predicates", "results"):
            # The expressions are our own data, from the file in this package.
            family[table] = [[*row[:-1], eval(row[-1])] for row in family[table]]
    return families


def invented_tasks(count: int, seed: int = 0) -> list[str]:
    """Return `count` openings of functions, from imports to docstring.

    About 2,000 are different; larger counts repeat them.
    """
    grid = [
        (parameter, *parts)
        for parameter, family in _families().items()
        for parts in product(family["predicates"], family["results"], STYLES)
    ]
    random = Random(seed)
    random.shuffle(grid)
    return [_opening(*grid[i % len(grid)], random) for i in range(count)]


def _opening(parameter: str, predicate, result, style: str, random: Random) -> str:
    (phrase, noun, holds), (sentence, name, returns, function) = predicate, result
    name = name.format(noun)
    given = random.choice(_families()[parameter]["inputs"])
    value = function([item for item in given if holds(item)])
    doc = f"{random.choice(OPENERS)} {sentence.format(phrase)}."
    prompt = f"    >>> {name}({given!r})\n    {value!r}\n"
    equation = f"    Example: {name}({given!r}) == {value!r}\n"
    example = random.choice((prompt, equation, ""))
    typed = random.random() < 0.6
    imports = "from typing import Dict, List, Optional\n\n\n"
    head = imports if typed and random.random() < 0.7 else ""
    untyped = f"def {name}({parameter.partition(':')[0]}):\n"
    signature = f"def {name}({parameter}) -> {returns}:\n" if typed else untyped
    return head + signature + style.format(doc=doc, example=example)
