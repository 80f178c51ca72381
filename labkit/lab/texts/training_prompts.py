"""Provide prompts to train a draft on: chat, openings of functions, and code to edit.

A draft learns to predict the target's answers, so the variety of the prompts limits
what it can learn. None of the prompts is used in an evaluation.

- Chat prompts combine wordings with topics: about 15,000 combinations
  (data/training_prompts.json).
- Code prompts are the openings of functions. The functions come from the training part
  of the standard library or from `invented_tasks`.
- Edit prompts ask for changes to functions of the library.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from functools import cache
from itertools import islice
from random import Random

from labkit.errors import BadRequest
from labkit.files import data_path
from labkit.lab.texts.invented_tasks import invented_tasks
from labkit.lab.texts.library import documents
from labkit.lab.texts.prompt_kinds import Prompt


def training_prompts(kind: str, count: int, seed: int = 0) -> list[Prompt]:
    """Return up to `count` prompts of a kind.

    "chat" and "edit" prompts are messages for the chat template. "code" and "functions"
    prompts are plain text; "functions" has no invented tasks but includes methods. The
    library has about 850 functions, which limits "edit". Equal seeds give equal prompts
    on one Python version. Raises BadRequest if there is no such kind.
    """
    if kind not in ("chat", "code", "edit", "functions"):
        raise BadRequest(
            f"There are no prompts of kind {kind!r}; choose chat, code, edit or functions."
        )
    random = Random(f"{kind} {seed}")
    if kind == "chat":
        return [Prompt(kind, text) for text in islice(_chat(random), count)]
    functions = list(_library_functions(methods=kind == "functions"))
    random.shuffle(functions)
    if kind == "edit":
        wordings, frames = _lists()["edit"], _lists()["edit_frames"]
        prompts = []
        for _, code in functions[:count]:
            frame, edit = random.choice(frames), random.choice(wordings)
            prompts.append(Prompt(kind, frame.format(edit=edit, code=code.rstrip())))
        return prompts
    openings = [opening for opening, _ in functions]
    if kind == "code":
        openings = invented_tasks(count - count // 3, seed) + openings[: count // 3]
        random.shuffle(openings)
    return [Prompt(kind, text, chat=False) for text in openings[:count]]


@cache
def _lists() -> dict:
    return json.loads(data_path("training_prompts.json").read_text(encoding="utf-8"))


def _chat(random: Random) -> Iterator[str]:
    """Yield different messages.

    The weight of a family of wordings is the square root of its number of combinations.
    """
    fill, wordings = _lists()["fill"], _lists()["chat"]
    weights = {kind: (len(texts) * len(fill[kind])) ** 0.5 for kind, texts in wordings.items()}
    yielded: set[str] = set()
    while True:
        (family,) = random.choices(list(weights), list(weights.values()))
        wording = random.choice(wordings[family])
        text = wording.format_map({name: random.choice(words) for name, words in fill.items()})
        if text not in yielded:
            yielded.add(text)
            yield text


@cache
def _library_functions(methods: bool = False) -> tuple[tuple[str, str], ...]:
    """Return (opening with docstring, whole function) of each short library function."""
    functions = []
    for document in documents("code", "training"):
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):  # lines were removed from the document
            continue
        lines = document.text.split("\n")
        for node in ast.walk(tree) if methods else tree.body:
            if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
                continue
            whole = [line[node.col_offset :] for line in lines[node.lineno - 1 : node.end_lineno]]
            opening = whole[: node.body[0].end_lineno - node.lineno + 1]
            fits = 5 <= len(whole) <= 25 and max(map(len, whole)) < 100
            if fits and len(opening) < len(whole):
                functions.append(("\n".join(opening) + "\n", "\n".join(whole) + "\n"))
    return tuple(functions)
