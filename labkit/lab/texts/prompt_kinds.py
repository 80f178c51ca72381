"""Prompts of ten kinds, to measure what depends on the text, such as acceptance.

    prompts("copy")            a passage to be repeated word for word
    prompts("edit")            a function in which a name is to be changed
    prompts("humaneval")       a function to be completed (raw text, no chat)
    prompts("chat")            everyday questions
    prompts("summary") … and "json", "list", "story", "maths", "explain"

Passages come from the evaluation part of the library, functions from HumanEval, the
rest from data/prompts.yaml. All of it is evaluation text: nothing is calibrated or
trained on it. The order is fixed; use every other prompt to measure something and the
rest to check it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from labkit.errors import BadRequest
from labkit.files import data_path
from labkit.lab.texts.library import document, names
from labkit.lab.texts.problems import humaneval

PASSAGE = range(150, 421)  # characters


@dataclass(frozen=True)
class Prompt:
    kind: str
    text: str
    raw: bool = False  # the text itself, without a chat template

    def ids(self, tokenizer) -> list[int]:
        return tokenizer.encode(self.text) if self.raw else tokenizer.chat(self.text)


@cache
def prompts(kind: str) -> tuple[Prompt, ...]:
    """Return the prompts of a kind, always in the same order."""
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise BadRequest(f"There are no prompts of the kind {kind!r}; choose one of {known}.")
    texts = COMPOSED[kind]() if kind in COMPOSED else _written()[kind]
    return tuple(Prompt(kind, text, raw=kind == "humaneval") for text in texts)


@cache
def _written() -> dict[str, list[str]]:
    import yaml

    return yaml.safe_load(data_path("prompts.yaml").read_text(encoding="utf-8"))


@cache
def _passages(count: int) -> list[str]:
    """Return whole paragraphs of the evaluation part, one per document."""
    passages = []
    for name in names("prose", "evaluation"):
        paragraphs = [text.strip() for text in document("prose", name).text.split("\n\n")]
        paragraphs = [text for text in paragraphs if len(text) in PASSAGE]
        if paragraphs:
            passages.append(max(paragraphs, key=len))
        if len(passages) == count:
            break
    return passages


def _copies() -> list[str]:
    ask = "Write out the passage below exactly as it stands."
    return [f"{ask}\n\n{text}" for text in _passages(16)]


def _summaries() -> list[str]:
    return [f"Summarise in two sentences:\n\n{text}" for text in _passages(24)[16:]]


def _edits() -> list[str]:
    edits = []
    for problem in humaneval()[20:]:
        opening = problem.prompt.split('"""')[0].split("'''")[0].rstrip()
        code = f"{opening}\n{problem.canonical_solution.rstrip()}"
        name = re.search(rf"def {problem.entry_point}\((\w+)", code)
        if name and 160 <= len(code) <= 700:
            ask = f"Rename the parameter `{name[1]}` to `value` in this function."
            edits.append(f"{ask} Answer with the whole function.\n\n```python\n{code}\n```")
    return edits[:16]


def _explanations() -> list[str]:
    functions = [p.prompt.split('"""')[0] + p.canonical_solution for p in humaneval()[100:108]]
    return [f"What does this function do?\n\n```python\n{code}```" for code in functions]


COMPOSED = {
    "copy": _copies,
    "edit": _edits,
    "humaneval": lambda: [problem.prompt for problem in humaneval()[:16]],
    "summary": _summaries,
    "explain": _explanations,
}
KINDS = "copy edit humaneval chat summary json list story maths explain".split()
