"""Small programming tasks put together from parts: a signature, a docstring and, often, an example that is true.

"Return the {sum} of the numbers that are {even}": every aggregation with every predicate, over whole numbers, words and
characters, in several styles of docstring. They are for training a draft model, which should have seen openings of
functions in the way people write them; none of them is a task of an evaluation.
"""

from __future__ import annotations

from itertools import product
from random import Random

NUMBERS = {  # phrase -> name, predicate
    "even": ("even", lambda x: x % 2 == 0),
    "odd": ("odd", lambda x: x % 2 == 1),
    "positive": ("positive", lambda x: x > 0),
    "negative": ("negative", lambda x: x < 0),
    "divisible by three": ("threes", lambda x: x % 3 == 0),
    "greater than ten": ("large", lambda x: x > 10),
    "square numbers": ("squares", lambda x: x >= 0 and int(x**0.5) ** 2 == x),
    "made of two digits": ("two_digit", lambda x: 10 <= abs(x) <= 99),
}
OF_NUMBERS = {
    "the sum of the numbers that are {}": ("sum_of_{}", "int", sum),
    "how many of the numbers are {}": ("count_{}", "int", len),
    "the numbers that are {}, in their original order": ("only_{}", "List[int]", list),
    "the largest of the numbers that are {}, or None": ("largest_{}", "Optional[int]", lambda x: max(x, default=None)),
    "the numbers that are {} in descending order": ("sorted_{}", "List[int]", lambda x: sorted(x, reverse=True)),
    "the squares of the numbers that are {}": ("squared_{}", "List[int]", lambda x: [a * a for a in x]),
    "True if any of the numbers is {} and False otherwise": ("has_{}", "bool", bool),
    "the mean of the numbers that are {}; 0 if there is none": ("mean_of_{}", "float", lambda x: sum(x) / len(x) if x else 0),
    "the distinct numbers that are {}": ("distinct_{}", "List[int]", lambda x: list(dict.fromkeys(x))),
}
WORDS = {
    "start with a vowel": ("vowel_words", lambda w: w[:1].lower() in "aeiou"),
    "have more than four letters": ("long_words", lambda w: len(w) > 4),
    "contain a digit": ("words_with_digits", lambda w: any(c.isdigit() for c in w)),
    "are written in capitals": ("capitals", str.isupper),
    "read the same backwards": ("mirror_words", lambda w: w == w[::-1]),
    "end with the letter s": ("plurals", lambda w: w.endswith("s")),
    "have an even length": ("even_words", lambda w: len(w) % 2 == 0),
}
OF_WORDS = {
    "the words that {}": ("find_{}", "List[str]", list),
    "how many words {}": ("count_{}", "int", len),
    "the longest of the words that {}, or an empty string": ("longest_of_{}", "str", lambda w: max(w, key=len, default="")),
    "the words that {}, joined by commas": ("join_{}", "str", ",".join),
    "the words that {}, sorted alphabetically": ("sort_{}", "List[str]", sorted),
    "a dictionary from each word that fits to its length; words fit if they {}": ("map_{}", "Dict[str, int]", lambda w: {a: len(a) for a in w}),
}
LETTERS = {
    "vowels": ("vowels", lambda c: c.lower() in "aeiou"),
    "digits": ("digits", str.isdigit),
    "capital letters": ("capital_letters", str.isupper),
    "spaces": ("spaces", str.isspace),
    "letters": ("letters", str.isalpha),
}
OF_LETTERS = {
    "the number of {} in the text": ("number_of_{}", "int", len),
    "the {} of the text as one string": ("keep_{}", "str", "".join),
    "the {} of the text in reverse order": ("reverse_{}", "str", lambda c: "".join(reversed(c))),
    "a dictionary that counts the {} of the text": ("tally_{}", "Dict[str, int]", lambda c: {a: c.count(a) for a in c}),
    "True if the text has at least two {}": ("two_{}", "bool", lambda c: len(c) > 1),
}
INPUTS = {
    "numbers: List[int]": ([3, 8, -2, 15, 9, 4], [12, 7, -9, 0, 16, 31, 6], [5, 5, 10, -4, 27]),
    "words: List[str]": (["apple", "level", "NASA", "keys", "b2b"], ["owl", "noon", "trees", "USA", "x9", "idea"]),
    "text: str": ("The 3 Owls of June", "Room 42 is OPEN now", "a quick Brown fox"),
}
STYLES = (
    '    """ {doc}\n{example}    """\n',
    '    """{doc}\n{example}    """\n',
    "    '''\n    {doc}\n{example}    '''\n",
    '    """\n    {doc}\n\n{example}    """\n',
    "    # {doc}\n",
)


def invented_tasks(count: int, seed: int = 0) -> list[str]:
    """`count` openings of functions, imports to docstring; all different as long as there are enough (about 2,000)."""
    families = [("numbers: List[int]", NUMBERS, OF_NUMBERS), ("words: List[str]", WORDS, OF_WORDS), ("text: str", LETTERS, OF_LETTERS)]
    grid = [(p, *pair, style) for p, one, of in families for pair in product(one.items(), of.items()) for style in STYLES]
    random = Random(seed)
    random.shuffle(grid)
    return [_opening(*grid[i % len(grid)], random) for i in range(count)]


def _opening(parameter: str, predicate, aggregate, style: str, random: Random) -> str:
    (phrase, (noun, holds)), (sentence, (name, returns, value)) = predicate, aggregate
    name = name.format(noun)
    given = random.choice(INPUTS[parameter])
    result = value([item for item in given if holds(item)])
    doc = f"{random.choice(('Return', 'Compute', 'Find', 'Given the input, return', 'Write a function that returns'))} {sentence.format(phrase)}."
    shown = random.choice((f"    >>> {name}({given!r})\n    {result!r}\n", f"    Example: {name}({given!r}) == {result!r}\n", ""))
    typed = random.random() < 0.6
    head = "from typing import Dict, List, Optional\n\n\n" if typed and random.random() < 0.7 else ""
    signature = f"def {name}({parameter}) -> {returns}:\n" if typed else f"def {name}({parameter.partition(':')[0]}):\n"
    return head + signature + style.format(doc=doc, example=shown)
