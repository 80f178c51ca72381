"""Combine small programming tasks from parts.

A task has a signature, a docstring and often an example. It reads "Return the {sum} of
the numbers that are {even}". Each result is combined with each predicate, over numbers,
words and characters, in several styles of docstring. The parts are in
data/invented_tasks.yaml. A draft learns from the tasks how functions usually begin. The
examples are correct, and no evaluation contains any of the tasks.
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
            # The expressions come from a file of this package.
            family[table] = [[*row[:-1], eval(row[-1])] for row in family[table]]
    return families


def invented_tasks(count: int, seed: int = 0) -> list[str]:
    """Return `count` openings of functions, from the imports to the docstring.

    About 2,000 of them are different. Larger counts repeat them.
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
    (phrase, noun, matches), (sentence, name, returns, function) = predicate, result
    name = name.format(noun)
    argument = random.choice(_families()[parameter]["inputs"])
    value = function([item for item in argument if matches(item)])
    doc = f"{random.choice(OPENERS)} {sentence.format(phrase)}."
    prompt = f"    >>> {name}({argument!r})\n    {value!r}\n"
    equation = f"    Example: {name}({argument!r}) == {value!r}\n"
    body = style.format(doc=doc, example=random.choice((prompt, equation, "")))
    if random.random() >= 0.6:
        return f"def {name}({parameter.partition(':')[0]}):\n{body}"
    imports = "from typing import Dict, List, Optional\n\n\n" if random.random() < 0.7 else ""
    return f"{imports}def {name}({parameter}) -> {returns}:\n{body}"
