"""MMLU's public dev split with answers and rationales, and its translations.

The English items are few-shot prompts written by hand, not a clean table: 57 subjects, 282 items. The
audit below counts what is odd instead of assuming that nothing is. Few-shot examples come from the same
items, so an item is never its own example, nor is a second copy of it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from labkit.assets import asset_path
from labkit.errors import BadRequest

LETTERS = "ABCD"
LANGUAGES = ("en", "de", "es", "fr", "hi", "it", "pt", "th")
MAX_SHOTS = 4  # a subject has five items at most, and one of them is being asked


@dataclass(frozen=True)
class MMLUItem:
    subject: str
    index: int  # within the subject, as published
    question: str
    choices: tuple[str, ...]
    answer: str | None  # "A" … "D"; None where the published letter is none of these
    rationale: str = ""  # English only
    language: str = "en"

    @property
    def id(self) -> str:
        return f"{self.language}/{self.subject}/{self.index}"

    @property
    def answer_text(self) -> str:
        return self.choices[LETTERS.index(self.answer)]


def mmlu(language: str = "en", *, readable: bool = True) -> tuple[MMLUItem, ...]:
    """The items of a language: those that can be scored by letter, or with readable=False every one."""
    if language not in LANGUAGES:
        raise BadRequest(f"There is no MMLU in {language!r}; choose from {', '.join(LANGUAGES)}.")
    items = _english() if language == "en" else _translated(language)
    return tuple(item for item in items if item.answer is not None) if readable else items


def few_shot(item: MMLUItem, items: Sequence[MMLUItem], shots: int = MAX_SHOTS, seed: int = 0) -> list[MMLUItem]:
    """At most `shots` other items of the same subject and language: leave-one-out, copies left out too."""
    if not 0 <= shots <= MAX_SHOTS:
        raise BadRequest(f"shots is {shots}; a subject has five items, so ask for 0 to {MAX_SHOTS}.")
    others = [
        other
        for other in items
        if (other.subject, other.language) == (item.subject, item.language)
        and other.answer is not None
        and other.question != item.question
    ]
    Random(f"{seed} {item.id}").shuffle(others)
    return others[:shots]


def audit(items: Sequence[MMLUItem] | None = None) -> dict[str, list[str]]:
    """What is odd, as {finding: [item ids]}; stated in the tables that use the items."""
    items = mmlu(readable=False) if items is None else items
    per_subject = Counter(item.subject for item in items)
    questions = Counter((item.language, item.subject, item.question) for item in items)
    # "\frac" in a string that was once unescaped: the backslash and its letter became white space.
    broken_tex = re.compile(r"\n(?:actorial|rac\b|rac\{|ightarrow)|\t(?:imes|heta)|\x0c|\x08")
    return {
        "no readable letter": [item.id for item in items if item.answer is None],
        "not four choices": [item.id for item in items if len(item.choices) != 4],
        "equal choices": [item.id for item in items if len(set(item.choices)) < len(item.choices)],
        "subject with fewer than five": sorted(name for name, count in per_subject.items() if count < 5),
        "asked twice": [item.id for item in items if questions[item.language, item.subject, item.question] > 1],
        "rationale inside the question": [
            item.id for item in items if re.search(r"\b[Hh]ence it is (?:not )?true\b", item.question)
        ],
        "broken LaTeX": [item.id for item in items if broken_tex.search(item.question + item.rationale)],
    }


@cache
def _english() -> tuple[MMLUItem, ...]:
    prompts = json.loads((asset_path("mmlu") / "_cot_prompts.json").read_text(encoding="utf-8"))
    return tuple(
        parse(subject, index, text)
        for subject, prompt in prompts.items()
        for index, text in enumerate(re.split(r"(?:^|\n\n)Q: ", prompt)[1:])
    )


def parse(subject: str, index: int, text: str) -> MMLUItem:
    """`question\\n(A) … (B) … (C) … (D) …\\nA: rationale. The answer is (B).` as an item."""
    asked, _, rationale = text.partition("\nA: ")
    marks = list(re.finditer(r"\(([A-E])\)\s", asked))
    ends = [mark.start() for mark in marks[1:]] + [len(asked)]
    choices = tuple(asked[mark.end() : end].strip() for mark, end in zip(marks, ends))
    published = re.search(r"[Tt]he answer is \(([A-Z])\)", rationale)
    readable = published is not None and len(choices) == 4 and published[1] in LETTERS
    question = asked[: marks[0].start()].strip() if marks else asked.strip()
    return MMLUItem(subject, index, question, choices, published[1] if readable else None, rationale.strip())


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
            items.append(MMLUItem(settings["task_alias"], index, question, choices, answer, language=language))
    return tuple(items)


def _read_yaml(text: str):
    """Plain data only; the files' `!function` tags name code that is not run, and become None."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        pass

    Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
    return yaml.load(text, Loader)
