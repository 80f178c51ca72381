"""Load the items of two tasks: HumanEval and the public dev split of MMLU.

HumanEval has 164 functions to write, with their tests. Nothing is executed here.

MMLU has 282 English items in 57 subjects, with rationales, and translations of them.
The English items are parsed from published few-shot prompts. Few-shot examples come
from the same items, so `few_shot` leaves out the question itself.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from labkit.errors import BadRequest
from labkit.lab.assets import asset_path

LETTERS = "ABCD"
LANGUAGES = ("en", "de", "es", "fr", "hi", "it", "pt", "th")
MAX_SHOTS = 4  # a subject has up to five items, and one of them is the question


@dataclass(frozen=True)
class Problem:
    """One function of HumanEval."""

    task_id: str  # "HumanEval/0"
    prompt: str  # imports, signature and docstring
    entry_point: str  # the name of the function
    canonical_solution: str  # the body of the function
    test: str  # defines check(candidate)


@dataclass(frozen=True)
class MMLUItem:
    """One question of MMLU with its choices and its answer."""

    subject: str
    index: int  # within the subject, as published
    question: str
    choices: tuple[str, ...]
    answer: str | None  # "A" to "D", or None if the published letter is another one
    rationale: str = ""  # English only
    language: str = "en"

    @property
    def id(self) -> str:
        return f"{self.language}/{self.subject}/{self.index}"

    @property
    def answer_text(self) -> str:
        return self.choices[LETTERS.index(self.answer)]


@cache
def humaneval() -> tuple[Problem, ...]:
    """Return all problems in their published order."""
    with gzip.open(asset_path("humaneval"), "rt", encoding="utf-8") as lines:
        return tuple(Problem(**json.loads(line)) for line in lines if line.strip())


def mmlu(language: str = "en") -> tuple[MMLUItem, ...]:
    """Return the items of a language that have an answer from A to D.

    Raises BadRequest if there is no such language.
    """
    if language not in LANGUAGES:
        raise BadRequest(f"There is no MMLU in {language!r}; choose from {', '.join(LANGUAGES)}.")
    items = _english() if language == "en" else _translated(language)
    return tuple(item for item in items if item.answer is not None)


def few_shot(
    item: MMLUItem, items: Sequence[MMLUItem], shots: int = MAX_SHOTS, seed: int = 0
) -> list[MMLUItem]:
    """Return up to `shots` of the `items` with the same subject and another question.

    The seed and the item determine the choice.
    """
    others = [one for one in items if one.subject == item.subject and one.question != item.question]
    Random(f"{seed} {item.id}").shuffle(others)
    return others[:shots]


@cache
def _english() -> tuple[MMLUItem, ...]:
    prompts = json.loads((asset_path("mmlu") / "_cot_prompts.json").read_text(encoding="utf-8"))
    return tuple(
        parse(subject, index, text)
        for subject, prompt in prompts.items()
        for index, text in enumerate(re.split(r"(?:^|\n\n)Q: ", prompt)[1:])
    )


def parse(subject: str, index: int, text: str) -> MMLUItem:
    """Parse one item of a few-shot prompt.

    The text is the question, then "(A) … (B) … (C) … (D) …", and then a line such as
    "A: rationale. The answer is (B)."
    """
    asked, _, rationale = text.partition("\nA: ")
    question, *choices = (part.strip() for part in re.split(r"\([A-E]\)\s", asked))
    letter = re.search(r"[Tt]he answer is \(([A-D])\)", rationale)
    answer = letter[1] if letter and len(choices) == len(LETTERS) else None
    return MMLUItem(subject, index, question, tuple(choices), answer, rationale.strip())


@cache
def _translated(language: str) -> tuple[MMLUItem, ...]:
    folder = asset_path("mmlu") / f"mmlu_{language}"
    items = []
    for path in sorted(folder.glob(f"mmlu_{language}_*.yaml")):
        settings = _read_yaml(path.read_text(encoding="utf-8"))
        for index, sample in enumerate(settings["fewshot_config"]["samples"]):
            choices = tuple(sample["input_choice_list"][letter].strip() for letter in LETTERS)
            (answer,) = sample["input_correct_responses"]
            published = (settings["task_alias"], index, sample["input_question"].strip())
            items.append(MMLUItem(*published, choices, answer, language=language))
    return tuple(items)


def _read_yaml(text: str):
    """Load plain data. A `!function` tag, which names code, becomes None."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        pass

    Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
    return yaml.load(text, Loader)
