"""MMLU's public dev split with answers and rationales, and its translations.

The English items (57 subjects, 282 items) are parsed from few-shot prompts written by
hand. Few-shot examples come from the same items, so an item and its copies are left out
of its own examples.
"""

from __future__ import annotations

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
class MMLUItem:
    subject: str
    index: int  # within the subject, as published
    question: str
    choices: tuple[str, ...]
    answer: str | None  # "A" … "D"; None if the published letter is another one
    rationale: str = ""  # English only
    language: str = "en"

    @property
    def id(self) -> str:
        return f"{self.language}/{self.subject}/{self.index}"

    @property
    def answer_text(self) -> str:
        return self.choices[LETTERS.index(self.answer)]


def mmlu(language: str = "en", *, readable: bool = True) -> tuple[MMLUItem, ...]:
    """Return the items of a language.

    `readable=False` includes those without a valid answer letter."""
    if language not in LANGUAGES:
        raise BadRequest(f"There is no MMLU in {language!r}; choose from {', '.join(LANGUAGES)}.")
    items = _english() if language == "en" else _translated(language)
    return tuple(item for item in items if item.answer is not None) if readable else items


def few_shot(
    item: MMLUItem, items: Sequence[MMLUItem], shots: int = MAX_SHOTS, seed: int = 0
) -> list[MMLUItem]:
    """Return up to `shots` other items of the same subject and language.

    Copies of `item` are left out."""
    if not 0 <= shots <= MAX_SHOTS:
        raise BadRequest(
            f"shots is {shots}; a subject has five items, so ask for 0 to {MAX_SHOTS}."
        )
    place = (item.subject, item.language)
    others = [other for other in items if (other.subject, other.language) == place]
    others = [one for one in others if one.answer is not None and one.question != item.question]
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
    """Parse `question\n(A) … (B) … (C) … (D) …\nA: rationale. The answer is (B).`"""
    asked, _, rationale = text.partition("\nA: ")
    marks = list(re.finditer(r"\(([A-E])\)\s", asked))
    ends = [mark.start() for mark in marks[1:]] + [len(asked)]
    choices = tuple(asked[mark.end() : end].strip() for mark, end in zip(marks, ends))
    published = re.search(r"[Tt]he answer is \(([A-Z])\)", rationale)
    readable = published is not None and len(choices) == 4 and published[1] in LETTERS
    question = asked[: marks[0].start()].strip() if marks else asked.strip()
    answer = published[1] if readable else None
    return MMLUItem(subject, index, question, choices, answer, rationale.strip())


@cache
def _translated(language: str) -> tuple[MMLUItem, ...]:
    folder = asset_path("mmlu") / f"mmlu_{language}"
    items = []
    for path in sorted(folder.glob(f"mmlu_{language}_*.yaml")):
        settings = _read_yaml(path.read_text(encoding="utf-8"))
        for index, sample in enumerate(settings["fewshot_config"]["samples"]):
            choices = tuple(sample["input_choice_list"][letter].strip() for letter in LETTERS)
            (answer,) = sample["input_correct_responses"]
            question = sample["input_question"].strip()
            subject = settings["task_alias"]
            items.append(MMLUItem(subject, index, question, choices, answer, language=language))
    return tuple(items)


def _read_yaml(text: str):
    """Load plain data; `!function` tags, which name code, become None."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        pass

    Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
    return yaml.load(text, Loader)
