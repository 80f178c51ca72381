"""The task `structured`: skills that a quantized model may lose and HumanEval and MMLU do not test.

    json       an object or array by a given schema
    tools      the right tool with exactly the right arguments
    copying    tables and codes, character by character
    document   find facts in a page of text and summarize it
    speakers   who said what in a conversation
    languages  instructions in seven other languages
    refusals   harmful requests, which the model must decline
    harmless   requests that sound harmful and that the model must answer

Each kind is a slice. The items are in data/structured.yaml; `prompt_task` describes how they are
judged. A slice has about ten items, which are too few to decide a share. Margins, bits per byte and
all items together decide more.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

from labkit.files import data_path
from labkit.lab.evals.prompt_task import AnswerTask, Asked, asked_from


def make(model, limit: int | None = None, **options) -> AnswerTask:
    """Return the task with `limit` items, the kinds interleaved."""
    # The sort is stable, so that the kinds stay in the file's order.
    spread = sorted(structured_items(), key=lambda item: int(item.id.rpartition("/")[2]))
    return AnswerTask("structured", tuple(spread[:limit]), **options)


@cache
def structured_items() -> tuple[Asked, ...]:
    """Return all items in the file's order, with the documents inserted."""
    import yaml

    data = yaml.safe_load(data_path("structured.yaml").read_text(encoding="utf-8"))
    counts, items = Counter(), []
    for entry in data["items"]:
        id, prompt = f"{entry['slice']}/{counts[entry['slice']]}", entry["prompt"]
        counts[entry["slice"]] += 1
        for name, text in data["documents"].items():
            prompt = prompt.replace("{" + name + "}", text)
        items.append(asked_from({**entry, "prompt": prompt}, id))
    return tuple(items)
