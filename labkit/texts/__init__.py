"""Task items, and text for calibration, training and evaluation, split once.

    humaneval(), mmlu(language)                 items of the tasks
    calibration_text(kind, seed), training_text(kind, seed)     from the running Python's library
    evaluation_documents(slice), evaluation_text(slice)         HumanEval, MMLU, a held-out library part

What is calibrated or trained on is never evaluated on: see labkit.texts.library for how, and
tests/test_texts.py for the proof. `revision()` names the Python whose library it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from labkit.errors import BadRequest
from labkit.texts.library import Document, document, names, revision
from labkit.texts.multiple_choice import LANGUAGES, MMLUItem, audit, few_shot, mmlu
from labkit.texts.problems import Problem, humaneval

EVALUATION_SLICES = ("code", "reasoning", "library", "prose")

__all__ = [
    "EVALUATION_SLICES",
    "LANGUAGES",
    "Document",
    "MMLUItem",
    "Problem",
    "audit",
    "calibration_documents",
    "calibration_text",
    "evaluation_documents",
    "evaluation_text",
    "few_shot",
    "humaneval",
    "mmlu",
    "revision",
    "training_documents",
    "training_text",
]


def calibration_documents(kind: str = "code", seed: int = 0) -> Iterable[Document]:
    """Documents of the calibration part ("code" or "prose") in an order that the seed decides; lazily."""
    return _shuffled(kind, "calibration", seed)


def training_documents(kind: str = "code", seed: int = 0) -> Iterable[Document]:
    """Documents of the training part, for distillation."""
    return _shuffled(kind, "training", seed)


def calibration_text(kind: str = "code", seed: int = 0, characters: int = 200_000) -> str:
    """About `characters` of calibration text, cut at a line."""
    return _joined(calibration_documents(kind, seed), characters)


def training_text(kind: str = "code", seed: int = 0, characters: int = 2_000_000) -> str:
    """About `characters` of training text, cut at a line."""
    return _joined(training_documents(kind, seed), characters)


def evaluation_documents(kind: str = "code") -> list[Document]:
    """A slice for evaluation, always in the same order.

    "code" is HumanEval's prompts with their solutions, "reasoning" MMLU's questions with their rationales,
    "library" and "prose" the held-out part of the library: its code, its topics and docstrings. A language ("de" ...) is
    MMLU's questions and answers in it.
    """
    if kind == "code":
        return [Document(problem.task_id, problem.prompt + problem.canonical_solution) for problem in humaneval()]
    if kind == "reasoning":
        return [Document(item.id, f"{item.question}\n{item.rationale}\n") for item in mmlu()]
    if kind in ("library", "prose"):
        source = "code" if kind == "library" else "prose"
        texts = (document(source, name) for name in names(source, "evaluation"))
        return [one for one in texts if one.text.strip()]
    if kind in LANGUAGES and kind != "en":
        return [Document(item.id, "\n".join([item.question, *item.choices]) + "\n") for item in mmlu(kind)]
    allowed = ", ".join([*EVALUATION_SLICES, *LANGUAGES[1:]])
    raise BadRequest(f"There is no evaluation text {kind!r}; choose from {allowed}.")


def evaluation_text(kind: str = "code", characters: int | None = None) -> str:
    """A slice as one text, at most about `characters` long."""
    return _joined(evaluation_documents(kind), characters)


def _shuffled(kind: str, part: str, seed: int) -> Iterable[Document]:
    order = list(names(kind, part))
    Random(seed).shuffle(order)
    return (one for one in (document(kind, name) for name in order) if one.text.strip())


def _joined(documents: Iterable[Document], characters: int | None) -> str:
    pieces, held = [], 0
    for one in documents:
        pieces.append(one.text.strip("\n") + "\n")
        held += len(pieces[-1]) + 1
        if characters is not None and held >= characters:
            break
    text = "\n".join(pieces)
    if characters is None or len(text) <= characters:
        return text
    cut = text.rfind("\n", 0, characters) + 1
    return text[: cut or characters]
