"""Provide prompts of ten kinds for measurements that depend on the text.

    prompts("copy")            a passage to repeat word for word
    prompts("edit")            a function in which to rename a parameter
    prompts("humaneval")       a function to complete (plain text, no chat)
    prompts("chat")            everyday questions
    prompts("explain")         a function to explain
    prompts("summary"), "json", "list", "story", "maths"

Acceptance of drafts is such a measurement. Passages come from the evaluation part of
the standard library, functions from HumanEval, and the other prompts from
data/prompts.yaml. All of this is evaluation text, so nothing is calibrated or trained
on it. The order is fixed: you can measure on every other prompt and check on the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import yaml

from labkit.errors import BadRequest
from labkit.files import data_path
from labkit.lab.texts.library import documents
from labkit.lab.texts.tasks import humaneval

PASSAGES = 24
PASSAGE = range(150, 421)  # characters of a passage
KINDS = "copy edit humaneval chat summary json list story maths explain".split()


@dataclass(frozen=True)
class Prompt:
    """A user's message for the model's chat template or, without `chat`, plain text."""

    kind: str
    text: str
    chat: bool = True

    def ids(self, tokenizer) -> list[int]:
        """Return the token ids of the prompt."""
        return tokenizer.chat(self.text) if self.chat else tokenizer.encode(self.text)


@cache
def prompts(kind: str) -> tuple[Prompt, ...]:
    """Return the prompts of a kind, always in the same order.

    Raises BadRequest if there is no such kind.
    """
    if kind not in KINDS:
        raise BadRequest(f"There are no prompts of kind {kind!r}; choose from {', '.join(KINDS)}.")
    written = yaml.safe_load(data_path("prompts.yaml").read_text(encoding="utf-8"))
    texts = COMPOSED[kind]() if kind in COMPOSED else written[kind]
    return tuple(Prompt(kind, text, chat=kind != "humaneval") for text in texts)


@cache
def _passages() -> list[str]:
    """Return the longest suitable paragraph of each evaluation document, up to 24."""
    passages: list[str] = []
    for document in documents("prose", "evaluation"):
        paragraphs = map(str.strip, document.text.split("\n\n"))
        suitable = [text for text in paragraphs if len(text) in PASSAGE]
        passages += sorted(suitable, key=len, reverse=True)[:1]
        if len(passages) == PASSAGES:
            break
    return passages


def _edits() -> list[str]:
    edits = []
    for problem in humaneval()[20:]:
        opening = re.split("\"\"\"|'''", problem.prompt)[0].rstrip()
        code = f"{opening}\n{problem.canonical_solution.rstrip()}"
        name = re.search(rf"def {problem.entry_point}\((\w+)", code)
        if name and 160 <= len(code) <= 700:
            ask = f"Rename the parameter `{name[1]}` to `value` in this function."
            edits.append(f"{ask} Answer with the whole function.\n\n```python\n{code}\n```")
    return edits[:16]


def _explanations() -> list[str]:
    functions = [p.prompt.split('"""')[0] + p.canonical_solution for p in humaneval()[100:108]]
    return [f"What does this function do?\n\n```python\n{code}```" for code in functions]


def _about_passages(ask: str, first: int, stop: int) -> list[str]:
    return [f"{ask}\n\n{text}" for text in _passages()[first:stop]]


COMPOSED = {
    "copy": lambda: _about_passages("Write out the passage below exactly as it stands.", 0, 16),
    "edit": _edits,
    "humaneval": lambda: [problem.prompt for problem in humaneval()[:16]],
    "summary": lambda: _about_passages("Summarise in two sentences:", 16, 24),
    "explain": _explanations,
}
