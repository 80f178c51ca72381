"""Prompts for a draft model to learn from: chat, openings of functions, code to be edited. Nothing here is evaluated.

A draft learns what *this* target says, so its text is the target's own answers, and what limits it is how varied the
questions are. Chat is composed of wordings and of what fills them (data/training_prompts.json, about 15,000 combinations);
code opens as functions of the library's training part do, or as invented tasks; what is edited is such a function.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from random import Random

from labkit.assets import data_path
from labkit.errors import BadRequest
from labkit.texts.invented_tasks import invented_tasks
from labkit.texts.library import document, names

KINDS = ("chat", "code", "edit", "functions")


@dataclass(frozen=True)
class Prompt:
    """`chat`: a user's message, to be put into the model's template; otherwise text to be continued."""

    kind: str
    text: str
    chat: bool


def training_prompts(kind: str, count: int, seed: int = 0) -> list[Prompt]:
    """`count` prompts of a kind; the same for the same seed on the same Python."""
    if kind not in KINDS:
        raise BadRequest(f"There are no training prompts of kind {kind!r}; choose from {', '.join(KINDS)}.")
    random = Random(f"{kind} {seed}")
    if kind == "chat":
        return [Prompt(kind, text, True) for text in islice(_chat(random), count)]
    if kind == "code":
        invented = invented_tasks(count - count // 3, seed)
        openings = [opening for opening, _ in islice(_functions(random), count // 3)]
        mixed = [*invented, *openings]
        random.shuffle(mixed)
        return [Prompt(kind, text, False) for text in mixed]
    if kind == "functions":  # of the library alone, methods too: openings as many people write them
        openings = [opening for opening, _ in _library_functions(methods=True)]
        random.shuffle(openings)
        return [Prompt(kind, text, False) for text in openings[:count]]
    wordings, frames = _lists()["edit"], _lists()["edit_frames"]
    return [
        Prompt(kind, random.choice(frames).format(edit=random.choice(wordings), code=code.rstrip()), True)
        for _, code in islice(_functions(random), count)
    ]


@cache
def _lists() -> dict:
    return json.loads(data_path("training_prompts.json").read_text(encoding="utf-8"))


def _chat(random: Random) -> Iterator[str]:
    """Messages, no two alike; each family of wordings as often as the root of what it can say."""
    fill, wordings = _lists()["fill"], _lists()["chat"]
    families = list(wordings)
    weights = [(len(wordings[family]) * len(fill[family])) ** 0.5 for family in families]
    said: set[str] = set()
    while True:
        (family,) = random.choices(families, weights)
        text = random.choice(wordings[family]).format_map({name: random.choice(words) for name, words in fill.items()})
        if text not in said:
            said.add(text)
            yield text


def _functions(random: Random) -> Iterator[tuple[str, str]]:
    """(opening up to the end of the docstring, whole function) of functions in the library's training part."""
    found = list(_library_functions())
    while True:
        random.shuffle(found)
        yield from found


@cache
def _library_functions(methods: bool = False) -> tuple[tuple[str, str], ...]:
    found = []
    for name in names("code", "training"):
        source = document("code", name).text
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # a run of lines was cut out
            continue
        lines = source.split("\n")
        for node in ast.walk(tree) if methods else tree.body:
            first = node.body[0] if isinstance(node, ast.FunctionDef) else None
            if first is None or not 4 <= node.end_lineno - node.lineno <= 24 or ast.get_docstring(node) is None:
                continue
            whole = [line[node.col_offset :] for line in lines[node.lineno - 1 : node.end_lineno]]
            opening = whole[: first.end_lineno - node.lineno + 1]
            if len(opening) < len(whole) and max(map(len, whole)) < 100:
                found.append(("\n".join(opening) + "\n", "\n".join(whole) + "\n"))
    return tuple(found)
