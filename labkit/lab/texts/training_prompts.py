"""Prompts to train a draft on: chat, openings of functions, code to edit.

No evaluation contains them. A draft learns to predict the target's own answers, so the
variety of the prompts limits what it learns. Chat combines wordings and fillings
(data/training_prompts.json, about 15,000 combinations). Code is functions of the
library's training part, or invented tasks; edits ask for changes to such functions.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from random import Random

from labkit.errors import BadRequest
from labkit.files import data_path
from labkit.lab.texts.invented_tasks import invented_tasks
from labkit.lab.texts.library import document, names

KINDS = ("chat", "code", "edit", "functions")


@dataclass(frozen=True)
class Prompt:
    """`chat`: a user's message for the model's template; otherwise text to continue."""

    kind: str
    text: str
    chat: bool


def training_prompts(kind: str, count: int, seed: int = 0) -> list[Prompt]:
    """Return `count` prompts of a kind; equal seeds on one Python give equal prompts."""
    if kind not in KINDS:
        raise BadRequest(
            f"There are no training prompts of kind {kind!r}; choose from {', '.join(KINDS)}."
        )
    random = Random(f"{kind} {seed}")
    if kind == "chat":
        return [Prompt(kind, text, True) for text in islice(_chat(random), count)]
    if kind == "code":
        invented = invented_tasks(count - count // 3, seed)
        openings = [opening for opening, _ in islice(_functions(random), count // 3)]
        mixed = [*invented, *openings]
        random.shuffle(mixed)
        return [Prompt(kind, text, False) for text in mixed]
    if kind == "functions":  # of the library alone, methods too
        openings = [opening for opening, _ in _library_functions(methods=True)]
        random.shuffle(openings)
        return [Prompt(kind, text, False) for text in openings[:count]]
    wordings, frames = _lists()["edit"], _lists()["edit_frames"]
    prompts = []
    for _, code in islice(_functions(random), count):
        frame, edit = random.choice(frames), random.choice(wordings)
        prompts.append(Prompt(kind, frame.format(edit=edit, code=code.rstrip()), True))
    return prompts


@cache
def _lists() -> dict:
    return json.loads(data_path("training_prompts.json").read_text(encoding="utf-8"))


def _chat(random: Random) -> Iterator[str]:
    """Yield distinct messages; a family's weight is the root of its combinations."""
    fill, wordings = _lists()["fill"], _lists()["chat"]
    families = list(wordings)
    weights = [(len(wordings[family]) * len(fill[family])) ** 0.5 for family in families]
    yielded: set[str] = set()
    while True:
        (family,) = random.choices(families, weights)
        text = random.choice(wordings[family]).format_map(
            {name: random.choice(words) for name, words in fill.items()}
        )
        if text not in yielded:
            yielded.add(text)
            yield text


def _functions(random: Random) -> Iterator[tuple[str, str]]:
    """Yield (opening with docstring, whole function) of the library's training part."""
    found = list(_library_functions())
    while True:
        random.shuffle(found)
        yield from found


@cache
def _library_functions(methods: bool = False) -> tuple[tuple[str, str], ...]:
    functions = []
    for name in names("code", "training"):
        source = document("code", name).text
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # a run of lines was cut out
            continue
        lines = source.split("\n")
        for node in ast.walk(tree) if methods else tree.body:
            if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
                continue
            whole = [line[node.col_offset :] for line in lines[node.lineno - 1 : node.end_lineno]]
            opening = whole[: node.body[0].end_lineno - node.lineno + 1]
            long = 4 <= len(whole) - 1 <= 24 and len(opening) < len(whole)
            if long and max(map(len, whole)) < 100:
                functions.append(("\n".join(opening) + "\n", "\n".join(whole) + "\n"))
    return tuple(functions)
