"""Task items, and text for calibration, training and evaluation, split once.

    humaneval(), mmlu(language)                              items of the tasks
    calibration_text(kind, seed), training_text(kind, seed)  Python's standard library
    evaluation_documents(slice), evaluation_text(slice)      HumanEval, MMLU, library

Text for calibration or training is never evaluated: see `labkit.lab.texts.library`.
`revision()` names the Python version of the library.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from labkit.errors import BadRequest
from labkit.lab.texts.library import Document, document, names, revision
from labkit.lab.texts.multiple_choice import LANGUAGES, MMLUItem, few_shot, mmlu
from labkit.lab.texts.problems import Problem, humaneval

EVALUATION_SLICES = ("code", "reasoning", "library", "prose")

__all__ = [
    "EVALUATION_SLICES", "LANGUAGES", "Document", "MMLUItem", "Problem",
    "calibration_documents", "calibration_text", "evaluation_documents", "evaluation_text",
    "few_shot", "humaneval", "mmlu", "revision", "training_documents", "training_text",
]  # fmt: skip


def calibration_documents(kind: str = "code", seed: int = 0) -> Iterable[Document]:
    """Yield calibration documents ("code" or "prose") in an order set by the seed."""
    return _shuffled(kind, "calibration", seed)


def training_documents(kind: str = "code", seed: int = 0) -> Iterable[Document]:
    """Yield documents of the training part, for distillation."""
    return _shuffled(kind, "training", seed)


def calibration_text(kind: str = "code", seed: int = 0, characters: int = 200_000) -> str:
    """Return about `characters` of calibration text, cut at a line."""
    return _joined(calibration_documents(kind, seed), characters)


def training_text(kind: str = "code", seed: int = 0, characters: int = 2_000_000) -> str:
    """Return about `characters` of training text, cut at a line."""
    return _joined(training_documents(kind, seed), characters)


def evaluation_documents(kind: str = "code") -> list[Document]:
    """Return a slice for evaluation, always in the same order.

    "code" is HumanEval's prompts with solutions. "reasoning" is MMLU's questions with
    rationales. "library" is the code of the library's evaluation part, and "prose" is
    its topics and docstrings. A language ("de" ...) is MMLU's questions and answers in
    that language.
    """
    if kind == "code":
        return [Document(one.task_id, one.prompt + one.canonical_solution) for one in humaneval()]
    if kind == "reasoning":
        return [Document(item.id, f"{item.question}\n{item.rationale}\n") for item in mmlu()]
    if kind in ("library", "prose"):
        source = "code" if kind == "library" else "prose"
        texts = (document(source, name) for name in names(source, "evaluation"))
        return [one for one in texts if one.text.strip()]
    if kind in LANGUAGES and kind != "en":
        texts = ((item.id, "\n".join([item.question, *item.choices])) for item in mmlu(kind))
        return [Document(name, f"{text}\n") for name, text in texts]
    allowed = ", ".join([*EVALUATION_SLICES, *LANGUAGES[1:]])
    raise BadRequest(f"There is no evaluation text {kind!r}; choose from {allowed}.")


def evaluation_text(kind: str = "code", characters: int | None = None) -> str:
    """Return a slice as one text of up to about `characters`."""
    return _joined(evaluation_documents(kind), characters)


def _shuffled(kind: str, part: str, seed: int) -> Iterable[Document]:
    order = list(names(kind, part))
    Random(seed).shuffle(order)
    return (one for one in (document(kind, name) for name in order) if one.text.strip())


def _joined(documents: Iterable[Document], characters: int | None) -> str:
    pieces, length = [], 0
    for one in documents:
        pieces.append(one.text.strip("\n") + "\n")
        length += len(pieces[-1]) + 1
        if characters is not None and length >= characters:
            break
    text = "\n".join(pieces)
    if characters is None or len(text) <= characters:
        return text
    cut = text.rfind("\n", 0, characters) + 1
    return text[: cut or characters]
