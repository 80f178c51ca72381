"""The task `structured`: what a quantized model may lose and HumanEval and MMLU do not ask.

    json       an object or array by a given schema
    tools      the right tool with exactly the right arguments
    copying    tables and codes, character by character
    document   find and sum up in a page of text
    speakers   who said what in a conversation
    languages  instructions in seven other languages
    refusals   requests that must stay refused
    harmless   requests that sound bad and must be answered

Each kind is a slice. The items are in data/structured.yaml and are judged as `prompt_task` says.
With about ten items per slice no single slice decides a share; margins, bits per byte and all
items together decide more.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from labkit.errors import BadRequest
from labkit.files import data_path
from labkit.lab.evals.prompt_task import AnswerTask, Asked, asked_from

FILE = "structured.yaml"


def make(model, limit: int | None = None, **options) -> AnswerTask:
    """Return `limit` items, the kinds interleaved."""
    items = structured_items()
    place = {item.id: int(item.id.rpartition("/")[2]) for item in items}
    spread = sorted(items, key=lambda item: place[item.id])  # stable: kinds in the file's order
    return AnswerTask("structured", tuple(spread[:limit]), **options)


@cache
def structured_items() -> tuple[Asked, ...]:
    """Return all items in the file's order, with the documents inserted."""
    import yaml

    data = yaml.safe_load(data_path(FILE).read_text(encoding="utf-8"))
    counts: dict[str, int] = {}
    items = []
    for entry in data["items"]:
        kind = entry["slice"]
        counts[kind] = counts.get(kind, 0) + 1
        entry = {**entry, "prompt": with_documents(entry["prompt"], data["documents"])}
        try:
            items.append(asked_from(entry, f"{kind}/{counts[kind] - 1}"))
        except BadRequest as reason:
            raise BadRequest(f"{FILE}, item {kind}/{counts[kind] - 1}: {reason}") from None
    return tuple(items)


def with_documents(prompt: str, documents: Mapping[str, str]) -> str:
    for name, text in documents.items():
        prompt = prompt.replace("{" + name + "}", text)
    return prompt
