"""What a quantised model may lose that HumanEval and MMLU do not ask: items of our own, each of one kind (its slice).

    json       an object or array to a given schema            document    find and sum up in a page of text
    tools      the right tool with exactly the right arguments  speakers    who said what in a conversation
    copying    tables and codes, character by character         languages   instructions in seven other languages
    refusals   requests that must stay refused                  harmless    requests that sound bad and must be answered

The items lie in data/structured.yaml; how they are judged is in `answers`. With about ten items a slice no single slice
decides a share; margins and bits a byte, and all items together, decide more.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from labkit.assets import data_path
from labkit.errors import BadRequest
from labkit.evals.answers import AnswerTask, Asked, asked_from

FILE = "structured.yaml"


def make(model, limit: int | None = None, **options) -> AnswerTask:
    """`limit` items, one of each kind in turn."""
    items = structured_items()
    place = {item.id: int(item.id.rpartition("/")[2]) for item in items}
    spread = sorted(items, key=lambda item: place[item.id])  # stable: kinds in the file's order
    return AnswerTask("structured", tuple(spread[:limit]), **options)


@cache
def structured_items() -> tuple[Asked, ...]:
    """All items in the file's order, documents put in."""
    import yaml

    data = yaml.safe_load(data_path(FILE).read_text(encoding="utf-8"))
    counts: dict[str, int] = {}
    found = []
    for entry in data["items"]:
        kind = entry["slice"]
        counts[kind] = counts.get(kind, 0) + 1
        entry = {**entry, "prompt": with_documents(entry["prompt"], data["documents"])}
        try:
            found.append(asked_from(entry, f"{kind}/{counts[kind] - 1}"))
        except BadRequest as reason:
            raise BadRequest(f"{FILE}, item {kind}/{counts[kind] - 1}: {reason}") from None
    return tuple(found)


def with_documents(prompt: str, documents: Mapping[str, str]) -> str:
    for name, text in documents.items():
        prompt = prompt.replace("{" + name + "}", text)
    return prompt
