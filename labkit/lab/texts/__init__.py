"""Load task items and text for calibration, training and evaluation.

    humaneval(), mmlu(language)                              items of the tasks
    calibration_text(kind, seed), training_text(kind, seed)  Python's standard library
    evaluation_documents(slice), evaluation_text(slice)      HumanEval, MMLU, library

Text for calibration and training is never evaluated; `labkit.lab.texts.library`
describes the split. Results depend on the Python version, because the library does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from labkit.errors import BadRequest
from labkit.lab.texts.library import Document, documents
from labkit.lab.texts.tasks import LANGUAGES, Problem, humaneval, mmlu

EVALUATION_SLICES = ("code", "reasoning", "library", "prose")

__all__ = [
    "EVALUATION_SLICES", "LANGUAGES", "Document", "Problem", "calibration_text", "documents",
    "evaluation_documents", "evaluation_text", "humaneval", "mmlu", "training_text",
]  # fmt: skip


def calibration_text(kind: str = "code", seed: int = 0, characters: int = 200_000) -> str:
    """Return up to about `characters` of calibration text, in whole lines.

    `kind` is "code" or "prose". The seed sets the order of the documents.
    """
    return _joined(documents(kind, "calibration", seed), characters)


def training_text(kind: str = "code", seed: int = 0, characters: int = 2_000_000) -> str:
    """Return up to about `characters` of training text, in whole lines.

    `kind` is "code" or "prose". The seed sets the order of the documents.
    """
    return _joined(documents(kind, "training", seed), characters)


def evaluation_documents(kind: str = "code") -> list[Document]:
    """Return the documents of an evaluation slice, always in the same order.

    ==============  ======================================================
    "code"          HumanEval: prompts with solutions
    "reasoning"     MMLU: questions with rationales
    "library"       the standard library's evaluation part: code
    "prose"         the standard library's evaluation part: documentation
    "de", "fr", …   MMLU in that language: questions with choices
    ==============  ======================================================

    Raises BadRequest if there is no such slice.
    """
    if kind == "code":
        return [Document(one.task_id, one.prompt + one.canonical_solution) for one in humaneval()]
    if kind == "reasoning":
        return [Document(item.id, f"{item.question}\n{item.rationale}\n") for item in mmlu()]
    if kind in ("library", "prose"):
        return list(documents("code" if kind == "library" else "prose", "evaluation"))
    if kind in LANGUAGES[1:]:
        return [Document(one.id, "\n".join([one.question, *one.choices, ""])) for one in mmlu(kind)]
    allowed = ", ".join([*EVALUATION_SLICES, *LANGUAGES[1:]])
    raise BadRequest(f"There is no evaluation text {kind!r}; choose from {allowed}.")


def evaluation_text(kind: str = "code", characters: int = sys.maxsize) -> str:
    """Return an evaluation slice as one text of up to `characters`, in whole lines."""
    return _joined(evaluation_documents(kind), characters)


def _joined(documents: Iterable[Document], characters: int) -> str:
    """Join documents and cut the text after the last line that fits."""
    pieces, length = [], 0
    for one in documents:
        pieces.append(one.text.strip("\n") + "\n")
        length += len(pieces[-1]) + 1
        if length >= characters:
            break
    text = "\n".join(pieces)
    cut = text.rfind("\n", 0, characters) + 1
    return text[: cut or characters]
